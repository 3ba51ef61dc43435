#ifndef JAXCOMM_FFI_CORE_DTYPE_H_
#define JAXCOMM_FFI_CORE_DTYPE_H_

#include <cstddef>
#include <optional>
#include <string_view>

#include "xla/ffi/api/ffi.h"

namespace jaxcomm {

using DataType = xla::ffi::DataType;

// How the elements of a reduction are combined.
enum class ReduceOp { kSum, kProduct, kMax, kMin, kMean };

std::optional<ReduceOp> ParseReduceOp(std::string_view name);
std::string_view ReduceOpName(ReduceOp op);

// The name jax.numpy gives the type, e.g. "bfloat16".
std::string_view DataTypeName(DataType dtype);

// Bytes of one element as XLA:CPU lays it out: packed types take a whole byte.
size_t ElementBytes(DataType dtype);

// Whether partial results of a reduction are kept in the type itself. Narrow floats
// would lose precision: theirs are kept in float32.
bool AccumulatesInItself(DataType dtype);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_CORE_DTYPE_H_
