// Which of NCCL's sums our kernels can do.
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
  int64_t words;
  float factor = 1;
};

// Returns none if the kernels cannot add it: it is no sum, not of whole words, or not
// of a type they add. Of any length: see MostWordsOfSum().
std::optional<OneShotSum> SumOf(const Step& step, int size);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_ONE_SHOT_SUM_H_
