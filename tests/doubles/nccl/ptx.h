// Kernels in NVIDIA's PTX, run on the host: the instructions that this package's use,
// and no others.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_PTX_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_PTX_H_

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/doubles/nccl/ptx_instructions.h"

namespace jaxcomm::fake {

class PtxKernel {
 public:
  // One thread after the other: a kernel whose threads wait for each other would hang.
  void Run(unsigned blocks, unsigned threads, const std::vector<char>& arguments) const;

  size_t argument_bytes() const { return argument_bytes_; }

 private:
  friend class PtxParser;
  size_t argument_bytes_ = 0;
  size_t num_registers_ = 0;
  std::vector<PtxInstruction> code_;
};

using PtxKernels = std::map<std::string, std::shared_ptr<const PtxKernel>>;

// The kernels of a text. False if it has anything that is not known here: `*wrong` says
// what.
bool ParsePtx(const std::string& text, PtxKernels* kernels, std::string* wrong);

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_PTX_H_
