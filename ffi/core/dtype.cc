#include "ffi/core/dtype.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace jaxcomm {
namespace {

constexpr std::pair<ReduceOp, std::string_view> kReduceOps[] = {
    {ReduceOp::kSum, "sum"}, {ReduceOp::kProduct, "prod"}, {ReduceOp::kMax, "max"},
    {ReduceOp::kMin, "min"}, {ReduceOp::kMean, "mean"},
};

constexpr std::pair<DataType, std::string_view> kDataTypes[] = {
    {DataType::PRED, "bool"},
    {DataType::S8, "int8"},
    {DataType::S16, "int16"},
    {DataType::S32, "int32"},
    {DataType::S64, "int64"},
    {DataType::U8, "uint8"},
    {DataType::U16, "uint16"},
    {DataType::U32, "uint32"},
    {DataType::U64, "uint64"},
    {DataType::F32, "float32"},
    {DataType::F64, "float64"},
    {DataType::C64, "complex64"},
    {DataType::C128, "complex128"},
    // The types from here on accumulate in float32.
    {DataType::F16, "float16"},
    {DataType::BF16, "bfloat16"},
    {DataType::F8E5M2, "float8_e5m2"},
    {DataType::F8E4M3, "float8_e4m3"},
    {DataType::F8E4M3FN, "float8_e4m3fn"},
    {DataType::F8E4M3B11FNUZ, "float8_e4m3b11fnuz"},
    {DataType::F8E5M2FNUZ, "float8_e5m2fnuz"},
    {DataType::F8E4M3FNUZ, "float8_e4m3fnuz"},
    {DataType::F8E3M4, "float8_e3m4"},
    {DataType::F8E8M0FNU, "float8_e8m0fnu"},
};

const auto* Find(DataType dtype) {
  return std::find_if(std::begin(kDataTypes), std::end(kDataTypes),
                      [&](const auto& known) { return known.first == dtype; });
}

}  // namespace

std::optional<ReduceOp> ParseReduceOp(std::string_view name) {
  for (const auto& [op, known] : kReduceOps) {
    if (known == name) return op;
  }
  return std::nullopt;
}

std::string_view ReduceOpName(ReduceOp op) {
  return kReduceOps[static_cast<int>(op)].second;
}

std::string_view DataTypeName(DataType dtype) {
  const auto* const known = Find(dtype);
  return known == std::end(kDataTypes) ? "unsupported" : known->second;
}

bool AccumulatesInItself(DataType dtype) { return Find(dtype) < Find(DataType::F16); }

size_t ElementBytes(DataType dtype) { return xla::ffi::ByteWidth(dtype); }

}  // namespace jaxcomm
