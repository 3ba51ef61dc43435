// What every handler does first: check, and find.
#ifndef JAXCOMM_FFI_XLA_ARRIVAL_H_
#define JAXCOMM_FFI_XLA_ARRIVAL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ffi/base/pointer_list.h"
#include "ffi/base/status.h"
#include "ffi/core/call_site.h"
#include "ffi/core/communicator.h"
#include "ffi/core/dtype.h"
#include "ffi/core/plan.h"
#include "ffi/core/registry.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm {

inline Leaf LeafOf(const xla::ffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  return Leaf{buffer.element_type(),
              {dims.begin(), dims.end()},
              static_cast<int64_t>(buffer.element_count()),
              ElementBytes(buffer.element_type())};
}

// One rank's arrival at a call site: its buffers are read and its communicator is
// found.
class Arrival {
 public:
  Arrival(CallSite* site, int64_t run_id, int64_t device_id,
          const xla::ffi::RemainingArgs& operands,
          const xla::ffi::RemainingRets& results)
      : operands_(operands.size()), results_(results.size()) {
    call.site = site;
    call.run_id = run_id;
    call.device_id = device_id;
    status = ReadAndFind(operands, results);
    call.tag = site->serial();
    call.shared_tag = site->shared_tag();
    call.operands = operands_.data();
    call.results = results_.data();
  }

  Status status;  // why the rank cannot take part
  std::shared_ptr<Communicator> communicator;
  Call call;

 private:
  // Fixes the shapes of the call site at its first call.
  Status ReadAndFind(const xla::ffi::RemainingArgs& operands,
                     const xla::ffi::RemainingRets& results) {
    const bool first = !call.site->has_shapes();
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
    if (first) {
      call.site->SetShapes(std::move(operand_leaves), std::move(result_leaves));
    }
    ASSIGN_OR_RETURN(communicator, Registry::Get().Find(*call.site, call.run_id));
    return OkStatus();
  }

  PointerList<const void, 16> operands_;
  PointerList<void, 16> results_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_XLA_ARRIVAL_H_
