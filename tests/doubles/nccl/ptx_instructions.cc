#include "tests/doubles/nccl/ptx_instructions.h"

#include <cmath>
#include <map>

namespace jaxcomm::fake {
namespace {

#include "ffi/backends/host/small_float.h"

using Instruction = PtxInstruction;
using Operand = PtxOperand;
using Thread = PtxThread;
using Kind = Operand::Kind;

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

const std::map<std::string, PtxOperation>& Instructions() {
  static const auto& known = *new std::map<std::string, PtxOperation>{
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

}  // namespace

const PtxOperation* FindPtxOperation(const std::string& name) {
  const auto found = Instructions().find(name);
  return found == Instructions().end() ? nullptr : &found->second;
}

}  // namespace jaxcomm::fake
