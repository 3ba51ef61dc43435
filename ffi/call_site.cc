#include "ffi/call_site.h"

#include <functional>
#include <string_view>

namespace jaxcomm {
namespace {

std::atomic<uint64_t> next_serial{1};

void AppendLeaves(const std::vector<Leaf>& leaves, std::string* out) {
  bool first = true;
  for (const Leaf& leaf : leaves) {
    if (!first) *out += ", ";
    first = false;
    *out += DataTypeName(leaf.dtype);
    *out += "[";
    for (size_t i = 0; i < leaf.dims.size(); ++i) {
      if (i > 0) *out += ",";
      *out += std::to_string(leaf.dims[i]);
    }
    *out += "]";
  }
}

}  // namespace

xla::ffi::TypeId CallSite::id = {};

CallSite::CallSite(Attributes attributes, int collective_index, Planner planner,
                   bool plan_reads_operands)
    : attributes_(std::move(attributes)),
      collective_index_(collective_index),
      planner_(planner),
      plan_reads_operands_(plan_reads_operands),
      serial_(next_serial.fetch_add(1, std::memory_order_relaxed)) {}

void CallSite::SetShapes(std::vector<Leaf> operands, std::vector<Leaf> results) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (has_shapes()) return;
  operands_ = std::move(operands);
  results_ = std::move(results);
  operand_bytes_ = 0;
  for (const Leaf& leaf : operands_) {
    operand_bytes_ += leaf.bytes();
  }
  std::string text =
      StrCat(attributes_.collective, "/", ReduceOpName(attributes_.reduce), "/");
  for (int64_t param : attributes_.params) text += StrCat(param, ",");
  AppendLeaves(operands_, &text);
  text += "->";
  AppendLeaves(results_, &text);
  signature_ = std::hash<std::string>{}(text);
  has_shapes_.store(true, std::memory_order_release);
}

std::string CallSite::ToString() const {
  std::string text = attributes_.name + "(";
  if (has_shapes()) AppendLeaves(operands_, &text);
  return text + ")";
}

Status CallSite::MakePlan(int size, const void* const* const* operands_of, Plan* plan) {
  const Problem problem{size, operands_, results_, attributes_.params};
  if (Status status = planner_(problem, operands_of, plan); status.failure()) {
    return status;
  }
  plan->Finish(size, results_);
  return OkStatus();
}

Status CallSite::GetPlan(int size, const Plan** plan) {
  const Plan* first = first_plan_.load(std::memory_order_acquire);
  if (first != nullptr && first_plan_size_ == size) {
    *plan = first;
    return OkStatus();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [plan_size, known] : plans_) {
    if (plan_size == size) {
      *plan = known.get();
      return OkStatus();
    }
  }
  auto made = std::make_unique<Plan>();
  if (Status status = MakePlan(size, nullptr, made.get()); status.failure()) {
    return status;
  }
  *plan = made.get();
  plans_.emplace_back(size, std::move(made));
  if (first == nullptr) {
    first_plan_size_ = size;
    first_plan_.store(*plan, std::memory_order_release);
  }
  return OkStatus();
}

}  // namespace jaxcomm
