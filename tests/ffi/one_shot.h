// Shared by the tests of small sums.
#ifndef JAXCOMM_TESTS_FFI_ONE_SHOT_H_
#define JAXCOMM_TESTS_FFI_ONE_SHOT_H_

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "ffi/backends/nccl/nccl_communicator.h"
#include "ffi/backends/nccl/one_shot.h"
#include "tests/ffi/copies.h"
#include "tests/ffi/fake_library.h"
#include "tests/ffi/fake_nccl.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {

inline std::shared_ptr<Communicator> MakeOneShot(
    int size, double timeout_seconds = 30,
    std::vector<std::vector<int64_t>> groups = {},
    OnFailure on_failure = OnFailure::kPoison) {
  setenv("JAXCOMM_FAKE_KERNELS", "1", 1);
  auto made =
      Make(size, timeout_seconds, Library(), std::move(groups), true, on_failure);
  TheFake().clear_trace();
  return made;
}

inline std::unique_ptr<CallSite> SumSite(int64_t elements,
                                         ReduceOp op = ReduceOp::kSum) {
  return MakeSite("all_reduce", {}, {FloatLeaf(elements)}, {FloatLeaf(elements)}, op);
}

inline int64_t OneShotCalls(Communicator& communicator) {
  return NcclStatsOf(communicator).one_shot_calls;
}

}  // namespace jaxcomm::testing

#endif  // JAXCOMM_TESTS_FFI_ONE_SHOT_H_
