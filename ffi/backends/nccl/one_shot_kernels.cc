#include "ffi/backends/nccl/one_shot_kernels.h"

#include <cstddef>

#include "ffi/status.h"

namespace jaxcomm {
namespace {

using Arguments = OneShotArguments;

constexpr OneShotWord kWords[] = {OneShotWord::kInt32, OneShotWord::kFloat32,
                                  OneShotWord::kFloat16, OneShotWord::kBfloat16};

// `text` with '#' replaced.
std::string With(const std::string& by, std::string text) {
  for (size_t at = 0; (at = text.find('#', at)) != std::string::npos;) {
    text.replace(at, 1, by);
    at += by.size();
  }
  return text;
}

std::string ForRanks(int first, const char* text) {
  std::string all;
  for (int rank = first; rank < Arguments::kMostRanks; ++rank) {
    all += With(std::to_string(rank), text);
  }
  return all;
}

// To the nearest bfloat16, ties to even, in the upper half.
constexpr char kRoundToBfloat16[] = R"(
  shr.u32 t0, #, 16;
  and.b32 t0, t0, 1;
  add.u32 t0, t0, 32767;
  add.u32 t0, t0, #;
  setp.nan.f32 q, #, #;
  selp.b32 #, 2143289344, t0, q;)";

// Adds the ranks' words, in their order: w0, and w1 and so on where in1 and so on say
// that there is such a rank. The sum is in w0.
std::string Sum(OneShotWord word) {
  switch (word) {
    case OneShotWord::kInt32:
      return ForRanks(1, R"(
  @in# add.u32 w0, w0, w#;)");
    case OneShotWord::kFloat32:
      return ForRanks(1, R"(
  @in# add.rn.f32 w0, w0, w#;)");
    case OneShotWord::kFloat16:
      return StrCat(R"(
  mov.b32 {h0, h1}, w0;
  cvt.f32.f16 low, h0;
  cvt.f32.f16 high, h1;)",
                    ForRanks(1, R"(
  mov.b32 {h0, h1}, w#;
  cvt.f32.f16 t0, h0;
  cvt.f32.f16 t1, h1;
  @in# add.rn.f32 low, low, t0;
  @in# add.rn.f32 high, high, t1;)"),
                    R"(
  cvt.rn.f16.f32 h0, low;
  cvt.rn.f16.f32 h1, high;
  mov.b32 w0, {h0, h1};)");
    case OneShotWord::kBfloat16:
      return StrCat(R"(
  shl.b32 low, w0, 16;
  and.b32 high, w0, 4294901760;)",
                    ForRanks(1, R"(
  shl.b32 t0, w#, 16;
  and.b32 t1, w#, 4294901760;
  @in# add.rn.f32 low, low, t0;
  @in# add.rn.f32 high, high, t1;)"),
                    With("low", kRoundToBfloat16), With("high", kRoundToBfloat16), R"(
  shr.u32 low, low, 16;
  and.b32 high, high, 4294901760;
  or.b32 w0, low, high;)");
  }
  return "";
}

// `text` with the places of arguments: "$rank;" becomes "[a+92];".
std::string Placed(std::string text) {
  const auto place = [&](const std::string& name, size_t offset) {
    const std::string wanted = StrCat("$", name, ";");
    for (size_t at = 0; (at = text.find(wanted, at)) != std::string::npos;) {
      text.replace(at, wanted.size(), StrCat("[a+", offset, "];"));
    }
  };
  place("operand", offsetof(Arguments, operand));
  place("result", offsetof(Arguments, result));
  place("stop", offsetof(Arguments, stop));
  for (size_t rank = 0; rank < Arguments::kMostRanks; ++rank) {
    place(StrCat("inbox", rank),
          offsetof(Arguments, inboxes) + rank * sizeof(uint64_t));
  }
  place("words", offsetof(Arguments, words));
  place("rank", offsetof(Arguments, rank));
  place("ranks", offsetof(Arguments, ranks));
  place("flag", offsetof(Arguments, flag));
  place("factor", offsetof(Arguments, factor));
  place("capacity", offsetof(Arguments, capacity));
  return text;
}

// A thread puts its words into everybody's inbox, its own too, and then adds what it
// finds in its own. Words that are a grid apart are one thread's.
std::string Kernel(OneShotWord word) {
  static_assert(Arguments::kMostRanks == 8, "as many as registers of a kind");
  // Where in an inbox the lines of word 0 are: in the first box of this half, and in
  // this rank's.
  const std::string begin = StrCat(R"(
  .reg .pred q, in<8>;
  .reg .b16 h<2>;
  .reg .b32 i, first, grid, words, rank, ranks, flag, capacity, half, mine, turns;
  .reg .b32 t<2>, w<8>, f<8>, low, high;
  .reg .b64 operand, result, stop, at, to, home, box, from<8>, line<8>;

  mov.u32 t0, %ctaid.x;
  mov.u32 t1, %ntid.x;
  mov.u32 first, %tid.x;
  mad.lo.u32 first, t0, t1, first;
  mov.u32 t0, %nctaid.x;
  mul.lo.u32 grid, t0, t1;
  ld.param.u64 operand, $operand;
  ld.param.u64 result, $result;
  ld.param.u64 stop, $stop;
  ld.param.u32 words, $words;
  ld.param.u32 rank, $rank;
  ld.param.u32 ranks, $ranks;
  ld.param.u32 flag, $flag;
  ld.param.u32 capacity, $capacity;
  and.b32 half, flag, 1;
  mul.lo.u32 half, half, ranks;
  mul.lo.u32 half, half, capacity;
  mad.lo.u32 mine, rank, capacity, half;
  mul.wide.u32 box, capacity, 8;)",
                                   ForRanks(0, R"(
  setp.gt.u32 in#, ranks, #;
  setp.eq.u32 q, rank, #;
  @q ld.param.u64 home, $inbox#;)"));
  const std::string multiply = R"(
  ld.param.f32 t0, $factor;
  mul.rn.f32 w0, w0, t0;)";
  const std::string send = StrCat(R"(
  mov.u32 i, first;
SEND:
  setp.ge.u32 q, i, words;
  @q bra SENT;
  mul.wide.u32 at, i, 4;
  add.u64 at, operand, at;
  ld.global.u32 w0, [at];)",
                                  word == OneShotWord::kFloat32 ? multiply : "", R"(
  mov.b64 line0, {w0, flag};
  add.u32 t0, mine, i;
  mul.wide.u32 to, t0, 8;)",
                                  ForRanks(0, R"(
  ld.param.u64 at, $inbox#;
  add.u64 at, at, to;
  @in# st.relaxed.sys.global.u64 [at], line0;)"),
                                  R"(
  add.u32 i, i, grid;
  bra SEND;
SENT:)");
  // Where there is no such rank, its line has come.
  const std::string prepare = StrCat(R"(
  mov.u32 i, first;
RECEIVE:
  setp.ge.u32 q, i, words;
  @q ret;
  add.u32 t0, half, i;
  mul.wide.u32 at, t0, 8;
  add.u64 at, home, at;)",
                                     ForRanks(0, R"(
  mov.b64 from#, at;
  add.u64 at, at, box;
  mov.u32 w#, 0;
  mov.u32 f#, flag;)"));
  const std::string receive = StrCat(R"(
  mov.u32 turns, 0;
AGAIN:)",
                                     ForRanks(0, R"(
  @in# ld.relaxed.sys.global.u64 line#, [from#];)"),
                                     ForRanks(0, R"(
  @in# mov.b64 {w#, f#}, line#;)"),
                                     R"(
  setp.eq.u32 q, f0, flag;)",
                                     ForRanks(1, R"(
  setp.eq.and.u32 q, f#, flag, q;)"),
                                     R"(
  @q bra THERE;
  add.u32 turns, turns, 1;
  and.b32 t0, turns, 1023;
  setp.ne.u32 q, t0, 0;
  @q bra AGAIN;
  ld.relaxed.sys.global.u32 t0, [stop];
  setp.eq.u32 q, t0, 0;
  @q bra AGAIN;
  ret;
THERE:)");
  return Placed(StrCat("\n.visible .entry ", OneShotKernelName(word),
                       "(.param .align 8 .b8 a[", sizeof(Arguments), "])\n{", begin,
                       send, prepare, receive, Sum(word), R"(
  mul.wide.u32 at, i, 4;
  add.u64 at, result, at;
  st.global.u32 [at], w0;
  add.u32 i, i, grid;
  bra RECEIVE;
}
)"));
}

}  // namespace

const char* OneShotKernelName(OneShotWord word) {
  switch (word) {
    case OneShotWord::kInt32:
      return "jaxcomm_sum_int32";
    case OneShotWord::kFloat32:
      return "jaxcomm_sum_float32";
    case OneShotWord::kFloat16:
      return "jaxcomm_sum_float16";
    case OneShotWord::kBfloat16:
      return "jaxcomm_sum_bfloat16";
  }
  return "";
}

std::string OneShotPtx() {
  std::string text = ".version 6.4\n.target sm_70\n.address_size 64\n";
  for (OneShotWord word : kWords) text += Kernel(word);
  return text;
}

}  // namespace jaxcomm
