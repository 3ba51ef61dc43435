// The operands and results of one custom call, as XLA hands them over.
#ifndef JAXCOMM_FFI_XLA_BUFFERS_H_
#define JAXCOMM_FFI_XLA_BUFFERS_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "ffi/base/status.h"
#include "ffi/core/call_site.h"
#include "ffi/core/dtype.h"
#include "ffi/core/plan.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm {

inline Leaf LeafOf(const xla::ffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  return Leaf{buffer.element_type(),
              {dims.begin(), dims.end()},
              static_cast<int64_t>(buffer.element_count()),
              ElementBytes(buffer.element_type())};
}

// Buffer pointers of one call: on the stack for the usual handful of leaves.
template <typename Pointer>
class Pointers {
 public:
  explicit Pointers(size_t count) {
    if (count > kInline) heap_.resize(count);
    data_ = count > kInline ? heap_.data() : inline_;
  }
  Pointer& operator[](size_t i) { return data_[i]; }
  Pointer* data() { return data_; }

 private:
  static constexpr size_t kInline = 16;
  Pointer inline_[kInline];
  std::vector<Pointer> heap_;
  Pointer* data_;
};

// The buffers of one call.
class Buffers {
 public:
  Buffers(const xla::ffi::RemainingArgs& operands,
          const xla::ffi::RemainingRets& results)
      : operands_(operands.size()), results_(results.size()) {}

  // Takes them down, and fixes the shapes of the call site at its first call.
  Status Read(CallSite* site, const xla::ffi::RemainingArgs& operands,
              const xla::ffi::RemainingRets& results) {
    const bool first = !site->has_shapes();
    std::vector<Leaf> operand_leaves, result_leaves;
    for (size_t i = 0; i < operands.size(); ++i) {
      auto buffer = operands.get<xla::ffi::AnyBuffer>(i);
      if (!buffer) return buffer.error();
      operands_[i] = buffer->untyped_data();
      if (first) operand_leaves.push_back(LeafOf(*buffer));
    }
    for (size_t i = 0; i < results.size(); ++i) {
      auto buffer = results.get<xla::ffi::AnyBuffer>(i);
      if (!buffer) return buffer.error();
      results_[i] = (*buffer)->untyped_data();
      if (first) result_leaves.push_back(LeafOf(**buffer));
    }
    if (first) site->SetShapes(std::move(operand_leaves), std::move(result_leaves));
    return OkStatus();
  }

  const void* const* operands() { return operands_.data(); }
  void* const* results() { return results_.data(); }

 private:
  Pointers<const void*> operands_;
  Pointers<void*> results_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_XLA_BUFFERS_H_
