// What went wrong, in words, for ncclGetLastError.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_ERRORS_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_ERRORS_H_

#include <string>

#include "tests/doubles/nccl/exports.h"

namespace jaxcomm::fake {

// Keeps `text` as the calling thread's last error; returns `result`.
nccl::Result Failure(nccl::Result result, const std::string& text);

// The same for a call of CUDA's that failed inside NCCL.
nccl::Result CudaFailure(cuda::Result result);

const std::string& LastFailure();

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_ERRORS_H_
