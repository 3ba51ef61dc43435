#include "tests/doubles/nccl/reduce.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace jaxcomm::fake {
namespace {

#include "ffi/backends/host/small_float.h"

template <typename T>
T Combine(nccl::RedOp op, T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    // 64-bit and unsigned: overflow wraps.
    switch (op) {
      case nccl::RedOp::kSum:
      case nccl::RedOp::kAvg:
        return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
      case nccl::RedOp::kProd:
        return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
      case nccl::RedOp::kMax:
        return std::max(a, b);
      case nccl::RedOp::kMin:
        return std::min(a, b);
    }
  } else {
    switch (op) {
      case nccl::RedOp::kSum:
      case nccl::RedOp::kAvg:  // of what was multiplied before
        return a + b;
      case nccl::RedOp::kProd:
        return a * b;
      case nccl::RedOp::kMax:
        return std::fmax(a, b);
      case nccl::RedOp::kMin:
        return std::fmin(a, b);
    }
  }
  return a;
}

// Buffers may lie at any address.
template <typename T>
void Loop(nccl::RedOp op, const void* from, void* to, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    T a, b;
    std::memcpy(&a, static_cast<char*>(to) + i * sizeof(T), sizeof(T));
    std::memcpy(&b, static_cast<const char*>(from) + i * sizeof(T), sizeof(T));
    if constexpr (std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>) {
      Narrow(Combine(op, Widen(a), Widen(b)), &a);
    } else {
      a = Combine(op, a, b);
    }
    std::memcpy(static_cast<char*>(to) + i * sizeof(T), &a, sizeof(T));
  }
}

template <typename T>
void Multiply(void* data, size_t count, T factor) {
  for (size_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, static_cast<char*>(data) + i * sizeof(T), sizeof(T));
    value *= factor;
    std::memcpy(static_cast<char*>(data) + i * sizeof(T), &value, sizeof(T));
  }
}

}  // namespace

size_t TypeBytes(nccl::Type type) {
  switch (type) {
    case nccl::Type::kInt8:
    case nccl::Type::kUint8:
      return 1;
    case nccl::Type::kFloat16:
    case nccl::Type::kBfloat16:
      return 2;
    case nccl::Type::kInt32:
    case nccl::Type::kUint32:
    case nccl::Type::kFloat32:
      return 4;
    case nccl::Type::kInt64:
    case nccl::Type::kUint64:
    case nccl::Type::kFloat64:
      return 8;
  }
  return 0;
}

bool IsRedOp(nccl::RedOp op, nccl::Type type) {
  if (op == nccl::RedOp::kAvg) {
    return type == nccl::Type::kFloat32 || type == nccl::Type::kFloat64;
  }
  return op >= nccl::RedOp::kSum && op <= nccl::RedOp::kMin;
}

void Premultiply(nccl::Type type, int ranks, void* data, size_t count) {
  if (type == nccl::Type::kFloat32) {
    Multiply<float>(data, count, 1 / static_cast<float>(ranks));
  } else {
    Multiply<double>(data, count, 1 / static_cast<double>(ranks));
  }
}

void Accumulate(nccl::Type type, nccl::RedOp op, const void* from, void* to,
                size_t count) {
  switch (type) {
    case nccl::Type::kInt8:
      return Loop<int8_t>(op, from, to, count);
    case nccl::Type::kUint8:
      return Loop<uint8_t>(op, from, to, count);
    case nccl::Type::kInt32:
      return Loop<int32_t>(op, from, to, count);
    case nccl::Type::kUint32:
      return Loop<uint32_t>(op, from, to, count);
    case nccl::Type::kInt64:
      return Loop<int64_t>(op, from, to, count);
    case nccl::Type::kUint64:
      return Loop<uint64_t>(op, from, to, count);
    case nccl::Type::kFloat16:
      return Loop<Float16>(op, from, to, count);
    case nccl::Type::kFloat32:
      return Loop<float>(op, from, to, count);
    case nccl::Type::kFloat64:
      return Loop<double>(op, from, to, count);
    case nccl::Type::kBfloat16:
      return Loop<BFloat16>(op, from, to, count);
  }
}

}  // namespace jaxcomm::fake
