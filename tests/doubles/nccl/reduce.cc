// The arithmetic of reductions, as NCCL's kernels do it: 16-bit floats are rounded
// after each step, and minimum and maximum pass over NaN.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "tests/doubles/nccl/operation.h"

namespace jaxcomm::fake {
namespace {

#include "ffi/backends/host/reduce/small_float.h"

template <typename T>
T Combine(nccl::RedOp op, T a, T b) {
  // Integers, as 64-bit and unsigned ones: overflow wraps.
  using Wide = std::conditional_t<std::is_integral_v<T>, uint64_t, T>;
  constexpr bool kIsFloat = std::is_floating_point_v<T>;
  switch (op) {
    case nccl::RedOp::kSum:
    case nccl::RedOp::kAvg:  // of what was multiplied before
      return static_cast<T>(static_cast<Wide>(a) + static_cast<Wide>(b));
    case nccl::RedOp::kProd:
      return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b));
    case nccl::RedOp::kMax:
      if constexpr (kIsFloat) return std::fmax(a, b);
      return std::max(a, b);
    case nccl::RedOp::kMin:
      if constexpr (kIsFloat) return std::fmin(a, b);
      return std::min(a, b);
  }
  return a;
}

// Buffers may lie at any address.
template <typename T>
T At(const void* data, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + i * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void Put(void* data, size_t i, T value) {
  std::memcpy(static_cast<char*>(data) + i * sizeof(T), &value, sizeof(T));
}

// Calls `body` with a value of the type; false for no type of ours.
template <typename Body>
bool WithType(nccl::Type type, const Body& body) {
  switch (type) {
    case nccl::Type::kInt8:
      return body(int8_t{}), true;
    case nccl::Type::kUint8:
      return body(uint8_t{}), true;
    case nccl::Type::kInt32:
      return body(int32_t{}), true;
    case nccl::Type::kUint32:
      return body(uint32_t{}), true;
    case nccl::Type::kInt64:
      return body(int64_t{}), true;
    case nccl::Type::kUint64:
      return body(uint64_t{}), true;
    case nccl::Type::kFloat16:
      return body(Float16{}), true;
    case nccl::Type::kFloat32:
      return body(float{}), true;
    case nccl::Type::kFloat64:
      return body(double{}), true;
    case nccl::Type::kBfloat16:
      return body(BFloat16{}), true;
  }
  return false;
}

}  // namespace

size_t TypeBytes(nccl::Type type) {
  size_t bytes = 0;
  WithType(type, [&](auto value) { bytes = sizeof(value); });
  return bytes;
}

bool IsRedOp(nccl::RedOp op, nccl::Type type) {
  if (op == nccl::RedOp::kAvg) {
    return type == nccl::Type::kFloat32 || type == nccl::Type::kFloat64;
  }
  return op >= nccl::RedOp::kSum && op <= nccl::RedOp::kMin;
}

void Premultiply(nccl::Type type, int ranks, void* data, size_t count) {
  WithType(type, [&](auto of_type) {
    using T = decltype(of_type);
    if constexpr (std::is_floating_point_v<T>) {
      const T factor = 1 / static_cast<T>(ranks);
      for (size_t i = 0; i < count; ++i) Put<T>(data, i, At<T>(data, i) * factor);
    }
  });
}

void Accumulate(nccl::Type type, nccl::RedOp op, const void* from, void* to,
                size_t count) {
  WithType(type, [&](auto of_type) {
    using T = decltype(of_type);
    for (size_t i = 0; i < count; ++i) {
      T value = At<T>(to, i);
      if constexpr (std::is_arithmetic_v<T>) {
        value = Combine(op, value, At<T>(from, i));
      } else {
        Narrow(Combine(op, Widen(value), Widen(At<T>(from, i))), &value);
      }
      Put<T>(to, i, value);
    }
  });
}

}  // namespace jaxcomm::fake
