// Parts of the targets' signatures. A binding is a type: each call makes a longer one.
#ifndef JAXCOMM_TESTS_DOUBLES_FLASH_BINDING_H_
#define JAXCOMM_TESTS_DOUBLES_FLASH_BINDING_H_

#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jaxcomm::fake {

using Operand = xla::ffi::AnyBuffer;
using Result = xla::ffi::Result<Operand>;

inline auto ThreeArrays() {
  return xla::ffi::Ffi::Bind().Arg<Operand>().Arg<Operand>().Arg<Operand>();
}

inline auto SixArrays() {
  return ThreeArrays().Arg<Operand>().Arg<Operand>().Arg<Operand>();
}

template <typename Binding>
auto WithMask(Binding binding) {
  return std::move(binding)
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

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_FLASH_BINDING_H_
