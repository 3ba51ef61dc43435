// Which of NCCL's sums the kernels of small sums can do.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_ONE_SHOT_SUM_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_ONE_SHOT_SUM_H_

#include <cstdint>
#include <optional>

#include "ffi/backends/nccl/kernels/kernels.h"
#include "ffi/backends/nccl/steps.h"

namespace jaxcomm {

// A sum as the kernels know it.
struct OneShotSum {
  OneShotWord word;
  uint32_t words;
  float factor = 1;
};

// None if it is not for them: too large, not of words, or not of a type they add.
std::optional<OneShotSum> SumOf(const Step& step, int size);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_ONE_SHOT_SUM_H_
