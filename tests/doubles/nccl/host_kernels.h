// kernels.cu, compiled for the host.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_HOST_KERNELS_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_HOST_KERNELS_H_

#include <cstddef>
#include <string>
#include <vector>

namespace jaxcomm::fake {

struct HostKernel {
  const char* name;
  bool is_sum;
  size_t argument_bytes;
  // On one thread of a grid.
  void (*run)(const char* arguments);
};

// Null if there is no such kernel.
const HostKernel* FindHostKernel(const std::string& name);

// Whether `text` is the PTX that kernels.cu was compiled to.
bool IsPtxOfKernels(const char* text);

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_HOST_KERNELS_H_
