#include "ffi/core/dtype.h"

namespace jaxcomm {

std::optional<ReduceOp> ParseReduceOp(std::string_view name) {
  if (name == "sum") return ReduceOp::kSum;
  if (name == "prod") return ReduceOp::kProduct;
  if (name == "max") return ReduceOp::kMax;
  if (name == "min") return ReduceOp::kMin;
  if (name == "mean") return ReduceOp::kMean;
  return std::nullopt;
}

std::string_view ReduceOpName(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kProduct:
      return "prod";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMean:
      return "mean";
  }
  return "?";
}

std::string_view DataTypeName(DataType dtype) {
  switch (dtype) {
    case DataType::PRED:
      return "bool";
    case DataType::S8:
      return "int8";
    case DataType::S16:
      return "int16";
    case DataType::S32:
      return "int32";
    case DataType::S64:
      return "int64";
    case DataType::U8:
      return "uint8";
    case DataType::U16:
      return "uint16";
    case DataType::U32:
      return "uint32";
    case DataType::U64:
      return "uint64";
    case DataType::F16:
      return "float16";
    case DataType::F32:
      return "float32";
    case DataType::F64:
      return "float64";
    case DataType::BF16:
      return "bfloat16";
    case DataType::C64:
      return "complex64";
    case DataType::C128:
      return "complex128";
    case DataType::F8E5M2:
      return "float8_e5m2";
    case DataType::F8E4M3:
      return "float8_e4m3";
    case DataType::F8E4M3FN:
      return "float8_e4m3fn";
    case DataType::F8E4M3B11FNUZ:
      return "float8_e4m3b11fnuz";
    case DataType::F8E5M2FNUZ:
      return "float8_e5m2fnuz";
    case DataType::F8E4M3FNUZ:
      return "float8_e4m3fnuz";
    case DataType::F8E3M4:
      return "float8_e3m4";
    case DataType::F8E8M0FNU:
      return "float8_e8m0fnu";
    default:
      return "unsupported";
  }
}

bool AccumulatesInItself(DataType dtype) {
  switch (dtype) {
    case DataType::PRED:
    case DataType::S8:
    case DataType::S16:
    case DataType::S32:
    case DataType::S64:
    case DataType::U8:
    case DataType::U16:
    case DataType::U32:
    case DataType::U64:
    case DataType::F32:
    case DataType::F64:
    case DataType::C64:
    case DataType::C128:
      return true;
    default:
      return false;
  }
}

size_t ElementBytes(DataType dtype) { return xla::ffi::ByteWidth(dtype); }

}  // namespace jaxcomm
