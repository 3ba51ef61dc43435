// What the instructions of PTX do that this package's kernels use.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_PTX_INSTRUCTIONS_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_PTX_INSTRUCTIONS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace jaxcomm::fake {

enum class PtxSpecial : uint64_t { kBlock, kBlocks, kThreads, kThread };

struct PtxOperand {
  enum class Kind { kRegister, kNumber, kSpecial, kMemory, kArgument, kPair, kLabel };
  Kind kind = Kind::kNumber;
  uint64_t number = 0;  // of the register; or a value, offset or place in the code
  size_t base = 0;      // register of an address
  size_t pair[2] = {};
};

// One of a kernel's, as far as it has come.
struct PtxThread {
  uint64_t block = 0, blocks = 0, threads = 0, thread = 0;
  const char* arguments = nullptr;
  std::vector<uint64_t> registers;
  size_t next = 0;  // instruction
  int loops = 0;

  // It may wait for a thread that is on no core. But where there are more of them, a
  // core that is given up comes back milliseconds later.
  void LoopsAgain() {
    if (++loops < 16 || loops % 128 == 0) std::this_thread::yield();
  }

  uint64_t Get(const PtxOperand& operand) const {
    switch (operand.kind) {
      case PtxOperand::Kind::kRegister:
        return registers[operand.number];
      case PtxOperand::Kind::kSpecial:
        switch (static_cast<PtxSpecial>(operand.number)) {
          case PtxSpecial::kBlock:
            return block;
          case PtxSpecial::kBlocks:
            return blocks;
          case PtxSpecial::kThreads:
            return threads;
          case PtxSpecial::kThread:
            return thread;
        }
        return 0;
      case PtxOperand::Kind::kPair:
        return 0;
      default:
        return operand.number;
    }
  }
  uint32_t Word(const PtxOperand& operand) const {
    return static_cast<uint32_t>(Get(operand));
  }
  float Float(const PtxOperand& operand) const {
    const uint32_t word = Word(operand);
    float value;
    std::memcpy(&value, &word, sizeof(value));
    return value;
  }
  void* Address(const PtxOperand& operand) const {
    return reinterpret_cast<void*>(registers[operand.base] + operand.number);
  }
  void Set(const PtxOperand& operand, uint64_t value) {
    registers[operand.number] = value;
  }
  void SetFloat(const PtxOperand& operand, float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof(word));
    Set(operand, word);
  }
};

struct PtxInstruction {
  void (*run)(PtxThread&, const PtxInstruction&) = nullptr;
  bool is_guarded = false;
  size_t guard = 0;  // register
  std::vector<PtxOperand> operands;
};

struct PtxOperation {
  void (*run)(PtxThread&, const PtxInstruction&) = nullptr;
  size_t operands = 0;
};

// By its name, such as "add.u32"; null if it is not known here.
const PtxOperation* FindPtxOperation(const std::string& name);

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_PTX_INSTRUCTIONS_H_
