// Kernels in NVIDIA's PTX, run on the host: the instructions that this package's use,
// and no others.
#ifndef JAXCOMM_FFI_BACKENDS_FAKE_PTX_H_
#define JAXCOMM_FFI_BACKENDS_FAKE_PTX_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace jaxcomm::fake {

class PtxKernel {
 public:
  // One thread after the other: a kernel whose threads wait for each other would hang.
  void Run(unsigned blocks, unsigned threads, const std::vector<char>& arguments) const;

  size_t argument_bytes() const { return argument_bytes_; }

  struct Thread;
  struct Operand {
    enum class Kind { kRegister, kNumber, kSpecial, kMemory, kArgument, kPair, kLabel };
    Kind kind = Kind::kNumber;
    uint64_t number = 0;  // of the register; or a value, offset or place in the code
    size_t base = 0;      // register of an address
    size_t pair[2] = {};
  };
  struct Instruction {
    void (*run)(Thread&, const Instruction&) = nullptr;
    bool is_guarded = false;
    size_t guard = 0;  // register
    std::vector<Operand> operands;
  };

 private:
  friend class PtxParser;
  size_t argument_bytes_ = 0;
  size_t num_registers_ = 0;
  std::vector<Instruction> code_;
};

using PtxKernels = std::map<std::string, std::shared_ptr<const PtxKernel>>;

// The kernels of a text. False if it has anything that is not known here: `*wrong` says
// what.
bool ParsePtx(const std::string& text, PtxKernels* kernels, std::string* wrong);

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_FFI_BACKENDS_FAKE_PTX_H_
