// The XLA FFI targets of FlashAttention-2 as dew-flash-attn has them, on CPUs. Their
// attributes are of other types than FlashAttention-3's, and of each other's.
#include <cstdint>
#include <optional>

#include "tests/doubles/flash/attention.h"
#include "tests/doubles/flash/binding.h"
#include "tests/doubles/flash/problem.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm::fake {
namespace {

constexpr Version kVersion = Version::kTwo;

// What dew-flash-attn does not ask for, and has no scratch for.
constexpr char kNeverAsked[] = "zero_tensors and deterministic are false here";

// The parts that the forward pass splits the keys into, as many as the first axis has.
bool HoldsParts(Operand query, Operand parts_of_out, Operand parts_of_lse) {
  const auto shape = query.dimensions(), out = parts_of_out.dimensions();
  if (shape.size() != 4 || out.size() != 5 || out[0] < 1) return false;
  const int64_t rows = out[0] * shape[0] * shape[1] * shape[2];
  return static_cast<int64_t>(parts_of_lse.element_count()) >= rows &&
         static_cast<int64_t>(parts_of_out.element_count()) >=
             rows * ((shape[3] + 31) / 32 * 32);
}

ffi::Error ForwardOfBatch(Operand query, Operand key, Operand value, double scale,
                          bool is_causal, int64_t left, int64_t right, Result out,
                          Result lse, Result parts_of_out, Result parts_of_lse) {
  if (!HoldsParts(query, *parts_of_out, *parts_of_lse)) {
    return Refuse("forward needs scratch of (parts, B, T, H, D in whole 32)");
  }
  return Forward(query, key, value, std::nullopt,
                 {kVersion, scale, is_causal, left, right},
                 {*out, *lse, *parts_of_out, *parts_of_lse});
}

ffi::Error ForwardOfPacked(Operand query, Operand key, Operand value, Operand starts,
                           Operand key_starts, int32_t longest, int32_t longest_key,
                           double scale, bool zero_tensors, bool is_causal,
                           int64_t left, int64_t right, Result out, Result lse,
                           Result spare_out, Result spare_lse) {
  if (zero_tensors) return Refuse(kNeverAsked);
  return Forward(query, key, value, Packing{starts, key_starts, longest, longest_key},
                 {kVersion, scale, is_causal, left, right},
                 {*out, *lse, *spare_out, *spare_lse});
}

ffi::Error BackwardOfBatch(Operand grad, Operand query, Operand key, Operand value,
                           Operand out, Operand lse, double scale, bool is_causal,
                           int64_t left, int64_t right, bool deterministic,
                           Result grad_query, Result grad_key, Result grad_value,
                           Result scratch_delta, Result scratch_query) {
  if (deterministic) return Refuse(kNeverAsked);
  return Backward(
      {grad, query, key, value, out, lse}, std::nullopt,
      {kVersion, scale, is_causal, left, right},
      {*grad_query, *grad_key, *grad_value, {*scratch_delta, *scratch_query}});
}

ffi::Error BackwardOfPacked(Operand grad, Operand query, Operand key, Operand value,
                            Operand out, Operand lse, Operand starts,
                            Operand key_starts, int64_t longest, int64_t longest_key,
                            float scale, bool zero_tensors, bool is_causal,
                            int64_t left, int64_t right, bool deterministic,
                            Result grad_query, Result grad_key, Result grad_value,
                            Result scratch_delta, Result scratch_query) {
  if (zero_tensors || deterministic) return Refuse(kNeverAsked);
  return Backward(
      {grad, query, key, value, out, lse},
      Packing{starts, key_starts, longest, longest_key},
      {kVersion, scale, is_causal, left, right},
      {*grad_query, *grad_key, *grad_value, {*scratch_delta, *scratch_query}});
}

template <typename Integer, typename Float, typename Binding>
auto WithLongestAndScale(Binding binding) {
  return std::move(binding)
      .template Arg<Operand>()
      .template Arg<Operand>()
      .template Attr<Integer>("max_seqlen_q")
      .template Attr<Integer>("max_seqlen_k")
      .template Attr<Float>("softmax_scale")
      .template Attr<bool>("zero_tensors");
}

template <typename Binding>
auto WithFiveResults(Binding binding) {
  return WithFourResults(std::move(binding).template Attr<bool>("deterministic"))
      .template Ret<Operand>();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    dew_flash_mha_fwd, ForwardOfBatch,
    WithFourResults(WithMask(ThreeArrays().Attr<double>("softmax_scale"))));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    dew_flash_mha_varlen_fwd, ForwardOfPacked,
    WithFourResults(WithMask(WithLongestAndScale<int32_t, double>(ThreeArrays()))));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    dew_flash_mha_bwd, BackwardOfBatch,
    WithFiveResults(WithMask(SixArrays().Attr<double>("softmax_scale"))));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    dew_flash_mha_varlen_bwd, BackwardOfPacked,
    WithFiveResults(WithMask(WithLongestAndScale<int64_t, float>(SixArrays()))));

#pragma GCC visibility pop

}  // namespace jaxcomm::fake
