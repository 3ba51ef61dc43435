// The XLA FFI targets of FlashAttention-3 as dew-flash-attn has them, on CPUs.
#include <cstdint>
#include <optional>
#include <utility>

#include "tests/doubles/flash/attention.h"
#include "tests/doubles/flash/problem.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm::fake {
namespace {

// Parts of the targets' signatures. A binding is a type: each call makes a longer one.
using Operand = ffi::AnyBuffer;
using Result = ffi::Result<Operand>;

auto ThreeArrays() {
  return ffi::Ffi::Bind().Arg<Operand>().Arg<Operand>().Arg<Operand>();
}

auto SixArrays() { return ThreeArrays().Arg<Operand>().Arg<Operand>().Arg<Operand>(); }

template <typename Binding>
auto WithScaleAndMask(Binding binding) {
  return std::move(binding)
      .template Attr<double>("softmax_scale")
      .template Attr<bool>("is_causal")
      .template Attr<int64_t>("window_size_left")
      .template Attr<int64_t>("window_size_right");
}

template <typename Binding>
auto WithFourResults(Binding binding) {
  return std::move(binding)
      .template Ret<Operand>()
      .template Ret<Operand>()
      .template Ret<Operand>()
      .template Ret<Operand>();
}

ffi::Error ForwardOfBatch(Operand query, Operand key, Operand value, double scale,
                          bool is_causal, int64_t left, int64_t right, Result out,
                          Result lse, Result spare_out, Result spare_lse) {
  return Forward(query, key, value, std::nullopt, {scale, is_causal, left, right},
                 {*out, *lse, *spare_out, *spare_lse});
}

ffi::Error ForwardOfPacked(Operand query, Operand key, Operand value, Operand starts,
                           Operand key_starts, int64_t longest, int64_t longest_key,
                           double scale, bool is_causal, int64_t left, int64_t right,
                           Result out, Result lse, Result spare_out, Result spare_lse) {
  return Forward(query, key, value, Packing{starts, key_starts, longest, longest_key},
                 {scale, is_causal, left, right}, {*out, *lse, *spare_out, *spare_lse});
}

ffi::Error BackwardOfBatch(Operand grad, Operand query, Operand key, Operand value,
                           Operand out, Operand lse, double scale, bool is_causal,
                           int64_t left, int64_t right, Result grad_query,
                           Result grad_key, Result grad_value, Result scratch_delta,
                           Result scratch_lse) {
  return Backward({grad, query, key, value, out, lse}, std::nullopt,
                  {scale, is_causal, left, right},
                  {*grad_query, *grad_key, *grad_value, *scratch_delta, *scratch_lse});
}

ffi::Error BackwardOfPacked(Operand grad, Operand query, Operand key, Operand value,
                            Operand out, Operand lse, Operand starts,
                            Operand key_starts, int64_t longest, int64_t longest_key,
                            double scale, bool is_causal, int64_t left, int64_t right,
                            Result grad_query, Result grad_key, Result grad_value,
                            Result scratch_delta, Result scratch_lse) {
  return Backward({grad, query, key, value, out, lse},
                  Packing{starts, key_starts, longest, longest_key},
                  {scale, is_causal, left, right},
                  {*grad_query, *grad_key, *grad_value, *scratch_delta, *scratch_lse});
}

template <typename Binding>
auto WithLongest(Binding binding) {
  return std::move(binding)
      .template Attr<int64_t>("max_seqlen")
      .template Attr<int64_t>("max_seqlen_k");
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(dew_flash3_mha_fwd, ForwardOfBatch,
                              WithFourResults(WithScaleAndMask(ThreeArrays())));
XLA_FFI_DEFINE_HANDLER_SYMBOL(dew_flash3_mha_varlen_fwd, ForwardOfPacked,
                              WithFourResults(WithScaleAndMask(WithLongest(
                                  ThreeArrays().Arg<Operand>().Arg<Operand>()))));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    dew_flash3_mha_bwd, BackwardOfBatch,
    WithFourResults(WithScaleAndMask(SixArrays())).Ret<Operand>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    dew_flash3_mha_varlen_bwd, BackwardOfPacked,
    WithFourResults(
        WithScaleAndMask(WithLongest(SixArrays().Arg<Operand>().Arg<Operand>())))
        .Ret<Operand>());

#pragma GCC visibility pop

}  // namespace jaxcomm::fake
