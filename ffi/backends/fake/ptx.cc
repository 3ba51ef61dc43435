#include "ffi/backends/fake/ptx.h"

#include <cmath>
#include <cstring>
#include <sstream>
#include <thread>

namespace jaxcomm::fake {
namespace {

#include "ffi/backends/host/small_float.h"

using Instruction = PtxKernel::Instruction;
using Operand = PtxKernel::Operand;
using Kind = Operand::Kind;

enum Special : uint64_t { kBlock, kThreads, kThread };

}  // namespace

struct PtxKernel::Thread {
  uint64_t block = 0, threads = 0, thread = 0;
  const char* arguments = nullptr;
  std::vector<uint64_t> registers;
  size_t next = 0;  // instruction
  int loops = 0;

  // It may wait for a thread that is on no core. But where there are more of them, a
  // core that is given up comes back milliseconds later.
  void LoopsAgain() {
    if (++loops < 16 || loops % 128 == 0) std::this_thread::yield();
  }

  uint64_t Get(const Operand& operand) const {
    switch (operand.kind) {
      case Kind::kRegister:
        return registers[operand.number];
      case Kind::kSpecial:
        return operand.number == kBlock     ? block
               : operand.number == kThreads ? threads
                                            : thread;
      case Kind::kPair:
        return 0;
      default:
        return operand.number;
    }
  }
  uint32_t Word(const Operand& operand) const {
    return static_cast<uint32_t>(Get(operand));
  }
  float Float(const Operand& operand) const {
    const uint32_t word = Word(operand);
    float value;
    std::memcpy(&value, &word, sizeof(value));
    return value;
  }
  void* Address(const Operand& operand) const {
    return reinterpret_cast<void*>(registers[operand.base] + operand.number);
  }
  void Set(const Operand& operand, uint64_t value) {
    registers[operand.number] = value;
  }
  void SetFloat(const Operand& operand, float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof(word));
    Set(operand, word);
  }
};

namespace {

using Thread = PtxKernel::Thread;
using Operation = void (*)(Thread&, const Instruction&);

// Of so many bits, from one to the other, of which either may be two registers of half.
template <int kBits>
void Move(Thread& t, const Instruction& i) {
  const Operand &to = i.operands[0], &from = i.operands[1];
  constexpr int kHalf = kBits / 2;
  constexpr uint64_t kLow = (uint64_t{1} << kHalf) - 1;
  uint64_t value = t.Get(from);
  if (from.kind == Kind::kPair) {
    value = (t.registers[from.pair[0]] & kLow) | t.registers[from.pair[1]] << kHalf;
  }
  if (to.kind == Kind::kPair) {
    t.registers[to.pair[0]] = value & kLow;
    t.registers[to.pair[1]] = value >> kHalf & kLow;
  } else {
    t.Set(to, value);
  }
}

template <typename T>
void LoadArgument(Thread& t, const Instruction& i) {
  T value;
  std::memcpy(&value, t.arguments + i.operands[1].number, sizeof(value));
  t.Set(i.operands[0], value);
}

template <typename T>
void Load(Thread& t, const Instruction& i) {
  t.Set(i.operands[0], *static_cast<const T*>(t.Address(i.operands[1])));
}

template <typename T>
void Store(Thread& t, const Instruction& i) {
  *static_cast<T*>(t.Address(i.operands[0])) = static_cast<T>(t.Get(i.operands[1]));
}

template <typename T>
void LoadRelaxed(Thread& t, const Instruction& i) {
  t.Set(i.operands[0],
        __atomic_load_n(static_cast<T*>(t.Address(i.operands[1])), __ATOMIC_RELAXED));
}

template <typename T>
void StoreRelaxed(Thread& t, const Instruction& i) {
  __atomic_store_n(static_cast<T*>(t.Address(i.operands[0])),
                   static_cast<T>(t.Get(i.operands[1])), __ATOMIC_RELAXED);
}

#define JAXCOMM_WORDS(expression)                              \
  [](Thread& t, const Instruction& i) {                        \
    [[maybe_unused]] const uint32_t a = t.Word(i.operands[1]); \
    [[maybe_unused]] const uint32_t b =                        \
        i.operands.size() > 2 ? t.Word(i.operands[2]) : 0;     \
    [[maybe_unused]] const uint64_t c =                        \
        i.operands.size() > 3 ? t.Get(i.operands[3]) : 0;      \
    t.Set(i.operands[0], (expression));                        \
  }
#define JAXCOMM_FLOATS(expression)                                      \
  [](Thread& t, const Instruction& i) {                                 \
    const float a = t.Float(i.operands[1]), b = t.Float(i.operands[2]); \
    t.SetFloat(i.operands[0], (expression));                            \
  }

struct Known {
  Operation run;
  size_t operands;
};

const std::map<std::string, Known>& Instructions() {
  static const auto& known = *new std::map<std::string, Known>{
      {"mov.u32", {JAXCOMM_WORDS(a), 2}},
      {"mov.b32", {Move<32>, 2}},
      {"mov.b64", {Move<64>, 2}},
      {"add.u32", {JAXCOMM_WORDS(a + b), 3}},
      {"add.u64",
       {[](Thread& t, const Instruction& i) {
          t.Set(i.operands[0], t.Get(i.operands[1]) + t.Get(i.operands[2]));
        },
        3}},
      {"mul.lo.u32", {JAXCOMM_WORDS(a * b), 3}},
      {"mul.wide.u32", {JAXCOMM_WORDS(uint64_t{a} * b), 3}},
      {"mad.lo.u32", {JAXCOMM_WORDS(a * b + static_cast<uint32_t>(c)), 4}},
      {"and.b32", {JAXCOMM_WORDS(a & b), 3}},
      {"or.b32", {JAXCOMM_WORDS(a | b), 3}},
      {"shl.b32", {JAXCOMM_WORDS(a << b), 3}},
      {"shr.u32", {JAXCOMM_WORDS(a >> b), 3}},
      {"setp.eq.u32", {JAXCOMM_WORDS(a == b), 3}},
      {"setp.ne.u32", {JAXCOMM_WORDS(a != b), 3}},
      {"setp.gt.u32", {JAXCOMM_WORDS(a > b), 3}},
      {"setp.ge.u32", {JAXCOMM_WORDS(a >= b), 3}},
      {"setp.eq.and.u32", {JAXCOMM_WORDS(a == b && c != 0), 4}},
      {"setp.nan.f32",
       {[](Thread& t, const Instruction& i) {
          t.Set(i.operands[0], std::isnan(t.Float(i.operands[1])) ||
                                   std::isnan(t.Float(i.operands[2])));
        },
        3}},
      {"selp.b32", {JAXCOMM_WORDS(c != 0 ? a : b), 4}},
      {"add.rn.f32", {JAXCOMM_FLOATS(a + b), 3}},
      {"mul.rn.f32", {JAXCOMM_FLOATS(a * b), 3}},
      {"cvt.f32.f16",
       {[](Thread& t, const Instruction& i) {
          const auto bits = static_cast<uint16_t>(t.Get(i.operands[1]));
          t.SetFloat(i.operands[0], Widen(Float16{bits}));
        },
        2}},
      {"cvt.rn.f16.f32",
       {[](Thread& t, const Instruction& i) {
          Float16 value;
          Narrow(t.Float(i.operands[1]), &value);
          t.Set(i.operands[0], value.bits);
        },
        2}},
      {"ld.param.u32", {LoadArgument<uint32_t>, 2}},
      {"ld.param.f32", {LoadArgument<uint32_t>, 2}},
      {"ld.param.u64", {LoadArgument<uint64_t>, 2}},
      {"ld.global.u32", {Load<uint32_t>, 2}},
      {"st.global.u32", {Store<uint32_t>, 2}},
      {"ld.relaxed.sys.global.u32", {LoadRelaxed<uint32_t>, 2}},
      {"ld.relaxed.sys.global.u64", {LoadRelaxed<uint64_t>, 2}},
      {"st.relaxed.sys.global.u64", {StoreRelaxed<uint64_t>, 2}},
      {"bra",
       {[](Thread& t, const Instruction& i) {
          if (i.operands[0].number < t.next) t.LoopsAgain();
          t.next = i.operands[0].number;
        },
        1}},
      {"ret", {[](Thread& t, const Instruction&) { t.next = SIZE_MAX; }, 0}},
  };
  return known;
}

#undef JAXCOMM_WORDS
#undef JAXCOMM_FLOATS

std::string Stripped(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

// At commas that are in no braces.
std::vector<std::string> Split(const std::string& text) {
  std::vector<std::string> parts;
  std::string part;
  bool in_braces = false;
  for (char letter : text) {
    in_braces = letter == '{' || (in_braces && letter != '}');
    if (letter == ',' && !in_braces) {
      parts.push_back(Stripped(part));
      part.clear();
    } else {
      part += letter;
    }
  }
  if (!Stripped(part).empty()) parts.push_back(Stripped(part));
  return parts;
}

}  // namespace

// Reads line by line: what this package writes has a statement on each.
class PtxParser {
 public:
  bool Parse(const std::string& text, PtxKernels* kernels, std::string* wrong) {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      line = Stripped(line);
      if (ReadLine(line, kernels)) continue;
      *wrong = line;
      return false;
    }
    return kernel_ == nullptr;
  }

 private:
  bool ReadLine(const std::string& line, PtxKernels* kernels) {
    if (line.empty() || line == "{") return true;
    if (line[0] == '.') return ReadDirective(line, kernels);
    if (kernel_ == nullptr) return false;
    if (line == "}") return End();
    if (line.back() == ':') {
      labels_[line.substr(0, line.size() - 1)] = kernel_->code_.size();
      return true;
    }
    return line.back() == ';' && ReadInstruction(line.substr(0, line.size() - 1));
  }

  bool ReadDirective(const std::string& line, PtxKernels* kernels) {
    std::istringstream words(line);
    std::string word;
    words >> word;
    if (word == ".version" || word == ".target" || word == ".address_size") return true;
    if (word == ".reg") return kernel_ != nullptr && ReadRegisters(line);
    if (word != ".visible" || kernel_ != nullptr) return false;
    const size_t name = line.find(".entry ") + 7;
    const size_t open = line.find('('), bytes = line.find("a["), close = line.find(']');
    if (open == std::string::npos || bytes == std::string::npos) return false;
    kernel_ = std::make_shared<PtxKernel>();
    kernel_->argument_bytes_ = std::stoul(line.substr(bytes + 2, close - bytes - 2));
    (*kernels)[line.substr(name, open - name)] = kernel_;
    return true;
  }

  bool ReadRegisters(const std::string& line) {
    const size_t names = line.find(' ', line.find(" .") + 1);
    for (const std::string& name : Split(line.substr(names, line.size() - 1 - names))) {
      const size_t count = name.find('<');
      if (count == std::string::npos) {
        Declare(name);
        continue;
      }
      for (int i = 0; i < std::stoi(name.substr(count + 1)); ++i) {
        Declare(name.substr(0, count) + std::to_string(i));
      }
    }
    return true;
  }

  void Declare(const std::string& name) {
    registers_.emplace(name, kernel_->num_registers_++);
  }

  bool ReadInstruction(std::string text) {
    Instruction instruction;
    if (text[0] == '@') {
      const size_t space = text.find(' ');
      instruction.is_guarded = true;
      if (!FindRegister(text.substr(1, space - 1), &instruction.guard)) return false;
      text = Stripped(text.substr(space));
    }
    const size_t space = text.find(' ');
    const auto known = Instructions().find(text.substr(0, space));
    if (known == Instructions().end()) return false;
    instruction.run = known->second.run;
    if (space != std::string::npos) {
      for (const std::string& operand : Split(text.substr(space))) {
        instruction.operands.emplace_back();
        if (!ReadOperand(operand, &instruction.operands.back())) return false;
      }
    }
    if (instruction.operands.size() != known->second.operands) return false;
    kernel_->code_.push_back(std::move(instruction));
    return true;
  }

  bool FindRegister(const std::string& name, size_t* number) const {
    const auto found = registers_.find(name);
    if (found == registers_.end()) return false;
    *number = found->second;
    return true;
  }

  bool ReadOperand(const std::string& text, Operand* operand) {
    size_t number = 0;
    if (FindRegister(text, &number)) {
      operand->kind = Kind::kRegister;
      operand->number = number;
      return true;
    }
    if (text[0] >= '0' && text[0] <= '9') {
      operand->number = std::stoull(text);
      return true;
    }
    if (text[0] == '{') {
      operand->kind = Kind::kPair;
      const auto parts = Split(text.substr(1, text.size() - 2));
      return parts.size() == 2 && FindRegister(parts[0], &operand->pair[0]) &&
             FindRegister(parts[1], &operand->pair[1]);
    }
    if (text[0] == '[') {
      const size_t plus = std::min(text.find('+'), text.size() - 1);
      const std::string base = text.substr(1, plus - 1);
      operand->kind = base == "a" ? Kind::kArgument : Kind::kMemory;
      if (text[plus] == '+') operand->number = std::stoull(text.substr(plus + 1));
      return base == "a" || FindRegister(base, &operand->base);
    }
    if (text[0] == '%') {
      operand->kind = Kind::kSpecial;
      operand->number = text == "%ctaid.x"  ? kBlock
                        : text == "%ntid.x" ? kThreads
                                            : kThread;
      return operand->number != kThread || text == "%tid.x";
    }
    operand->kind = Kind::kLabel;
    jumps_.push_back({kernel_->code_.size(), text});
    return true;
  }

  bool End() {
    for (const auto& [at, label] : jumps_) {
      const auto found = labels_.find(label);
      if (found == labels_.end()) return false;
      kernel_->code_[at].operands[0].number = found->second;
    }
    kernel_ = nullptr;
    registers_.clear();
    labels_.clear();
    jumps_.clear();
    return true;
  }

  std::shared_ptr<PtxKernel> kernel_;  // being read
  std::map<std::string, size_t> registers_, labels_;
  std::vector<std::pair<size_t, std::string>> jumps_;
};

void PtxKernel::Run(unsigned blocks, unsigned threads,
                    const std::vector<char>& arguments) const {
  Thread thread;
  thread.arguments = arguments.data();
  thread.threads = threads;
  for (thread.block = 0; thread.block < blocks; ++thread.block) {
    for (thread.thread = 0; thread.thread < threads; ++thread.thread) {
      thread.registers.assign(num_registers_, 0);
      thread.loops = 0;
      for (thread.next = 0; thread.next < code_.size();) {
        const Instruction& instruction = code_[thread.next++];
        if (instruction.is_guarded && thread.registers[instruction.guard] == 0) {
          continue;
        }
        instruction.run(thread, instruction);
      }
    }
  }
}

bool ParsePtx(const std::string& text, PtxKernels* kernels, std::string* wrong) {
  return PtxParser().Parse(text, kernels, wrong);
}

}  // namespace jaxcomm::fake
