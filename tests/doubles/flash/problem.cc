#include "tests/doubles/flash/problem.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jaxcomm::fake {
namespace {

// Rows of a tile, at most: what a sequence's last tile reaches over.
constexpr int64_t kTile = 128;

int64_t RoundUp(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

Shape ShapeOf(const ffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  return Shape(dims.begin(), dims.end());
}

ffi::Error Refused(const ffi::AnyBuffer& query, const ffi::AnyBuffer& key,
                   const ffi::AnyBuffer& value, size_t rank) {
  const ffi::DataType dtype = query.element_type();
  if (dtype != ffi::DataType::F16 && dtype != ffi::DataType::BF16) {
    return Refuse("queries are neither float16 nor bfloat16");
  }
  const Shape queries = ShapeOf(query), keys = ShapeOf(key);
  if (queries.size() != rank || keys.size() != rank || !Is(key, dtype, keys) ||
      !Is(value, dtype, keys)) {
    return Refuse(
        "query, key and value have not one rank and dtype, or key and value "
        "not one shape");
  }
  const int64_t width = queries[rank - 1];
  if (keys[rank - 1] != width) return Refuse("queries and keys differ in head size");
  if (width > 256) return Refuse("a head size is at most 256");
  if (width % 8 != 0 || width == 0) return Refuse("a head size is a multiple of 8");
  const int64_t heads = queries[rank - 2], key_heads = keys[rank - 2];
  if (key_heads == 0 || heads == 0 || heads % key_heads != 0) {
    return Refuse("the number of key heads does not divide that of query heads");
  }
  if (rank == 4 && queries[0] != keys[0]) return Refuse("batch sizes differ");
  return ffi::Error::Success();
}

// Takes over what FlashAttention-3 makes of the mask before it chooses a kernel.
void SetMask(Attributes attributes, int64_t longest_query, int64_t longest_key,
             Problem* problem) {
  problem->left = attributes.left >= longest_key - 1 ? -1 : attributes.left;
  problem->right = attributes.right >= longest_query - 1 ? -1 : attributes.right;
  if (attributes.is_causal) problem->right = 0;
}

// Rows of delta and lse in whole tiles.
void SetScratch(bool is_packed, int64_t longest_query, Problem* problem) {
  const auto& [rows, width, count] =
      std::tie(problem->query_rows, problem->width, problem->count);
  const bool is_masked = problem->left >= 0 || problem->right >= 0;
  const int64_t tile = width <= 64 ? 128 : width > 128 || is_masked ? 64 : 80;
  const int64_t padded = is_packed ? RoundUp(rows + count * tile, tile)
                                   : count * RoundUp(longest_query, tile);
  problem->scratch = padded * problem->heads;
}

ffi::Error SetPacked(const Packing& packing, Problem* problem) {
  const Shape shape = ShapeOf(packing.query_starts);
  if (shape.size() != 1 || shape[0] < 2 ||
      !Is(packing.query_starts, ffi::DataType::S32, shape) ||
      !Is(packing.key_starts, ffi::DataType::S32, shape)) {
    return Refuse(
        "cu_seqlens are not two int32 vectors of one entry more than there "
        "are sequences");
  }
  if (packing.longest_query < 1 || packing.longest_key < 1) {
    return Refuse("max_seqlen is not positive");
  }
  problem->count = shape[0] - 1;
  const int32_t* const queries = packing.query_starts.typed_data<int32_t>();
  const int32_t* const keys = packing.key_starts.typed_data<int32_t>();
  for (const auto& [starts, rows] :
       {std::pair(queries, problem->query_rows), std::pair(keys, problem->key_rows)}) {
    if (starts[0] < 0 || starts[problem->count] > rows ||
        !std::is_sorted(starts, starts + shape[0])) {
      return Refuse("cu_seqlens descend, or name rows that there are not");
    }
  }
  for (int64_t i = 0; i < problem->count; ++i) {
    Sequence each{};
    each.query = queries[i];
    each.queries = queries[i + 1] - queries[i];
    each.key = keys[i];
    each.keys = keys[i + 1] - keys[i];
    each.query_reach =
        std::min(RoundUp(each.queries, kTile), problem->query_rows - each.query);
    each.key_reach = std::min(RoundUp(each.keys, kTile), problem->key_rows - each.key);
    each.lse = each.query;
    if (each.queries <= packing.longest_query && each.keys <= packing.longest_key) {
      problem->sequences.push_back(each);
    }
  }
  return ffi::Error::Success();
}

void SetBatch(Problem* problem) {
  problem->count = problem->query_shape[0];
  for (int64_t i = 0; i < problem->count; ++i) {
    Sequence each{};
    each.queries = each.query_reach = problem->query_shape[1];
    each.query = i * each.queries;
    each.keys = each.key_reach = problem->key_shape[1];
    each.key = i * each.keys;
    each.lse = i * problem->heads * each.queries;
    problem->sequences.push_back(each);
  }
}

}  // namespace

ffi::Error Refuse(const std::string& why) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "FlashAttention: " + why);
}

bool Is(const ffi::AnyBuffer& buffer, ffi::DataType type, const Shape& shape) {
  return buffer.element_type() == type && ShapeOf(buffer) == shape;
}

ffi::ErrorOr<Problem> Describe(const ffi::AnyBuffer& query, const ffi::AnyBuffer& key,
                               const ffi::AnyBuffer& value,
                               const std::optional<Packing>& packing,
                               const Attributes& attributes) {
  const size_t rank = packing ? 3 : 4;
  if (ffi::Error error = Refused(query, key, value, rank); error.failure()) {
    return ffi::Unexpected(error);
  }
  // Of a scale of 0, what is masked comes out as 0 times -inf; of a negative one, the
  // largest exponent is not the one that is subtracted.
  if (!(attributes.scale > 0)) {
    return ffi::Unexpected(Refuse("softmax_scale is not positive"));
  }
  Problem problem{};
  problem.scale = attributes.scale;
  problem.dtype = query.element_type();
  problem.query_shape = ShapeOf(query);
  problem.key_shape = ShapeOf(key);
  problem.heads = problem.query_shape[rank - 2];
  problem.key_heads = problem.key_shape[rank - 2];
  problem.width = problem.query_shape[rank - 1];
  problem.query_rows = query.element_count() / (problem.heads * problem.width);
  problem.key_rows = key.element_count() / (problem.key_heads * problem.width);
  int64_t longest_query, longest_key;
  if (packing) {
    if (ffi::Error error = SetPacked(*packing, &problem); error.failure()) {
      return ffi::Unexpected(error);
    }
    longest_query = packing->longest_query;
    longest_key = packing->longest_key;
    problem.lse_head = problem.query_rows;
    problem.lse_shape = {problem.heads, problem.lse_head};
  } else {
    SetBatch(&problem);
    longest_query = problem.lse_head = problem.query_shape[1];
    longest_key = problem.key_shape[1];
    problem.lse_shape = {problem.count, problem.heads, longest_query};
  }
  SetMask(attributes, longest_query, longest_key, &problem);
  SetScratch(packing.has_value(), longest_query, &problem);
  return problem;
}

}  // namespace jaxcomm::fake
