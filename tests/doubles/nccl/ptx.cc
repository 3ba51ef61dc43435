#include "tests/doubles/nccl/ptx.h"

#include <algorithm>
#include <sstream>
#include <utility>

namespace jaxcomm::fake {
namespace {

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
    PtxInstruction instruction;
    if (text[0] == '@') {
      const size_t space = text.find(' ');
      instruction.is_guarded = true;
      if (!FindRegister(text.substr(1, space - 1), &instruction.guard)) return false;
      text = Stripped(text.substr(space));
    }
    const size_t space = text.find(' ');
    const PtxOperation* const operation = FindPtxOperation(text.substr(0, space));
    if (operation == nullptr) return false;
    instruction.run = operation->run;
    if (space != std::string::npos) {
      for (const std::string& operand : Split(text.substr(space))) {
        instruction.operands.emplace_back();
        if (!ReadOperand(operand, &instruction.operands.back())) return false;
      }
    }
    if (instruction.operands.size() != operation->operands) return false;
    kernel_->code_.push_back(std::move(instruction));
    return true;
  }

  bool FindRegister(const std::string& name, size_t* number) const {
    const auto found = registers_.find(name);
    if (found == registers_.end()) return false;
    *number = found->second;
    return true;
  }

  bool ReadOperand(const std::string& text, PtxOperand* operand) {
    size_t number = 0;
    if (FindRegister(text, &number)) {
      operand->kind = PtxOperand::Kind::kRegister;
      operand->number = number;
      return true;
    }
    if (text[0] >= '0' && text[0] <= '9') {
      operand->number = std::stoull(text);
      return true;
    }
    if (text[0] == '{') {
      operand->kind = PtxOperand::Kind::kPair;
      const auto parts = Split(text.substr(1, text.size() - 2));
      return parts.size() == 2 && FindRegister(parts[0], &operand->pair[0]) &&
             FindRegister(parts[1], &operand->pair[1]);
    }
    if (text[0] == '[') {
      const size_t plus = std::min(text.find('+'), text.size() - 1);
      const std::string base = text.substr(1, plus - 1);
      operand->kind =
          base == "a" ? PtxOperand::Kind::kArgument : PtxOperand::Kind::kMemory;
      if (text[plus] == '+') operand->number = std::stoull(text.substr(plus + 1));
      return base == "a" || FindRegister(base, &operand->base);
    }
    if (text[0] == '%') {
      operand->kind = PtxOperand::Kind::kSpecial;
      return FindSpecial(text, &operand->number);
    }
    operand->kind = PtxOperand::Kind::kLabel;
    jumps_.push_back({kernel_->code_.size(), text});
    return true;
  }

  static bool FindSpecial(const std::string& name, uint64_t* number) {
    for (const auto& [known, special] : {std::pair("%ctaid.x", PtxSpecial::kBlock),
                                         std::pair("%nctaid.x", PtxSpecial::kBlocks),
                                         std::pair("%ntid.x", PtxSpecial::kThreads),
                                         std::pair("%tid.x", PtxSpecial::kThread)}) {
      if (name != known) continue;
      *number = static_cast<uint64_t>(special);
      return true;
    }
    return false;
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
  PtxThread thread;
  thread.arguments = arguments.data();
  thread.blocks = blocks;
  thread.threads = threads;
  for (thread.block = 0; thread.block < blocks; ++thread.block) {
    for (thread.thread = 0; thread.thread < threads; ++thread.thread) {
      thread.registers.assign(num_registers_, 0);
      thread.loops = 0;
      for (thread.next = 0; thread.next < code_.size();) {
        const PtxInstruction& instruction = code_[thread.next++];
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
