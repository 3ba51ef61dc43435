#include "ffi/core/call_site.h"

#include <algorithm>
#include <set>
#include <unordered_map>

#include "ffi/core/hash.h"
#include "ffi/flight/operation_table.h"

namespace jaxcomm {
namespace {

std::atomic<uint64_t> next_serial{1};

// The sizes of the programs being instantiated, by number and by thread: two programs
// of one number may be compiled at a time.
class Programs {
 public:
  static Programs& Get() {
    static Programs* const programs = new Programs;
    return *programs;
  }

  // Called by the thread that lowers. From jaxlib 0.12 on it also instantiates. Earlier
  // a thread of XLA does, which we cannot tell apart.
  void Begin(int64_t program) {
    const uint64_t self = ThisThread();
    MutexLock lock(mutex_);
    lowering_.insert(self);
    std::vector<Open>& open = open_[program];
    open.erase(std::remove_if(open.begin(), open.end(),
                              [&](const Open& one) REQUIRES(mutex_) {
                                return one.first == self ||
                                       lowering_.count(one.first) == 0;
                              }),
               open.end());
  }

  std::shared_ptr<std::atomic<uint64_t>> Find(int64_t program) {
    MutexLock lock(mutex_);
    std::vector<Open>& open = open_[program];
    for (auto& [thread, size] : open) {
      if (thread == ThisThread()) return size;
    }
    open.emplace_back(ThisThread(), std::make_shared<std::atomic<uint64_t>>(0));
    return open.back().second;
  }

 private:
  // The system gives the id of a thread that has ended to another.
  static uint64_t ThisThread() {
    static std::atomic<uint64_t> last{0};
    thread_local const uint64_t self = ++last;
    return self;
  }

  using Open = std::pair<uint64_t, std::shared_ptr<std::atomic<uint64_t>>>;
  Mutex mutex_;
  std::set<uint64_t> lowering_ GUARDED_BY(mutex_);
  std::unordered_map<int64_t, std::vector<Open>> open_ GUARDED_BY(mutex_);
};

constexpr size_t kMostParams = 32;  // in a description

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

CallSite::CallSite(Attributes attributes, const Collective& collective)
    : attributes_(std::move(attributes)),
      collective_(collective),
      serial_(next_serial.fetch_add(1, std::memory_order_relaxed)),
      program_size_(Programs::Get().Find(attributes_.program)),
      ordinal_(program_size_->fetch_add(1)) {}

void BeginProgram(int64_t program) { Programs::Get().Begin(program); }

uint64_t CallSite::program_tag() const {
  // With the size: ranks that count differently must not meet by accident.
  return Mix(Mix(1, static_cast<uint64_t>(attributes_.program)), program_size_->load());
}

uint64_t CallSite::shared_tag() {
  uint64_t tag = shared_tag_.load(std::memory_order_relaxed);
  if (tag != 0) return tag;
  tag = Mix(program_tag(), ordinal_) | 1;
  // Another thread may have been first; its answer stands.
  uint64_t none = 0;
  return shared_tag_.compare_exchange_strong(none, tag) ? tag : none;
}

void CallSite::SetShapes(std::vector<Leaf> operands, std::vector<Leaf> results) {
  MutexLock lock(mutex_);
  if (has_shapes()) return;
  operands_ = std::move(operands);
  results_ = std::move(results);
  operand_bytes_ = 0;
  for (const Leaf& leaf : operands_) {
    operand_bytes_ += leaf.bytes();
  }
  std::string text =
      StrCat(collective_.name(), "/", ReduceOpName(attributes_.reduce), "/");
  for (int64_t param : attributes_.params) text += StrCat(param, ",");
  AppendLeaves(operands_, &text);
  text += "->";
  AppendLeaves(results_, &text);
  text += attributes_.part_of;
  signature_ = Fnv1a(text);  // the same on all processes
  std::string shapes;
  AppendLeaves(operands_, &shapes);
  label_ =
      std::make_shared<const std::string>(StrCat(attributes_.name, "(", shapes, ")"));
  description_ = *label_;
  // Early: messages between processes are cut.
  if (!attributes_.part_of.empty()) description_ += " of " + attributes_.part_of;
  // Two permutations differ only in their parameters.
  if (!attributes_.params.empty() && attributes_.params.size() <= kMostParams) {
    description_ += " with parameters [";
    for (size_t i = 0; i < attributes_.params.size(); ++i) {
      description_ += StrCat(i == 0 ? "" : ", ", attributes_.params[i]);
    }
    description_ += "]";
  }
  description_ += " over axes " + attributes_.axes;
  operation_ = OperationTable::Get().Intern(
      {std::string(collective_.name()), attributes_.name, shapes,
       operands_.empty() ? "" : std::string(DataTypeName(operands_[0].dtype)),
       operand_bytes_, signature_});
  has_shapes_.store(true, std::memory_order_release);
}

std::shared_ptr<Communicator> CallSite::CommunicatorAt(uint64_t epoch) const {
  const Known* const known = known_.load(std::memory_order_acquire);
  if (known == nullptr) return nullptr;
  const bool is_current = known->epoch.load(std::memory_order_acquire) == epoch;
  return is_current ? known->communicator.lock() : nullptr;
}

void CallSite::Remember(const std::shared_ptr<Communicator>& communicator,
                        uint64_t epoch) {
  MutexLock lock(mutex_);
  Known* known = known_.load(std::memory_order_relaxed);
  if (known == nullptr || known->communicator.lock() != communicator) {
    known = all_known_.emplace_back(std::make_unique<Known>()).get();
    known->communicator = communicator;
  }
  known->epoch.store(epoch, std::memory_order_release);
  known_.store(known, std::memory_order_release);
}

std::string CallSite::ToString() const {
  return has_shapes() ? *label_ : attributes_.name + "()";
}

ErrorOr<Plan> CallSite::MakePlan(int size,
                                 const void* const* const* operands_of) const {
  if (plan_reads_operands() && operands_of == nullptr) {
    return InvalidArgument(description_,
                           ": what it moves depends on the values of its operands, "
                           "which this backend cannot read");
  }
  Plan plan;
  plan.size = size;
  plan.kind = collective_.kind;
  plan.expansion = collective_.moves;
  plan.pairwise = collective_.pairwise;
  const Problem problem{size, operands_, results_, attributes_.params};
  Status status = collective_.planner(problem, operands_of, &plan);
  if (status.success()) return plan;
  return Status(*status.errc(), StrCat(description_, ": ", status.message()));
}

}  // namespace jaxcomm
