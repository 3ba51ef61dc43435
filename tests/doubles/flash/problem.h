// What a call asks for: the arrays, which of their rows belong together, and the mask.
#ifndef JAXCOMM_TESTS_DOUBLES_FLASH_PROBLEM_H_
#define JAXCOMM_TESTS_DOUBLES_FLASH_PROBLEM_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jaxcomm::fake {

namespace ffi = xla::ffi;

using Shape = std::vector<int64_t>;

ffi::Error Refuse(const std::string& why);

bool Is(const ffi::AnyBuffer& buffer, ffi::DataType type, const Shape& shape);

// Where the sequences of packed arrays begin, and attributes that say how long the
// longest is.
struct Packing {
  ffi::AnyBuffer query_starts, key_starts;
  int64_t longest_query, longest_key;
};

struct Attributes {
  double scale;
  bool is_causal;
  int64_t left, right;
};

// Rows of one sequence. Where tiles reach beyond its end, they stop at the `_reach`.
struct Sequence {
  int64_t query, queries, query_reach;
  int64_t key, keys, key_reach;
  int64_t lse;  // its first head's first row
};

// One call: arrays of rows [query_rows or key_rows, heads, width], and what each row
// sees.
struct Problem {
  ffi::DataType dtype;
  Shape query_shape, key_shape, lse_shape;
  int64_t query_rows, key_rows, heads, key_heads, width;
  int64_t lse_head;  // from one head's rows of lse to the next's
  int64_t count;     // of sequences, with those too long to compute
  std::vector<Sequence> sequences;
  double scale;
  int64_t left, right;  // below 0: no bound
  int64_t scratch;      // the least of each that backward needs

  // Causal masks and windows are of the diagonal that ends at the last key.
  bool Sees(const Sequence& sequence, int64_t row, int64_t column) const {
    const int64_t diagonal = row + sequence.keys - sequence.queries;
    return row < sequence.queries && column < sequence.keys &&
           (left < 0 || column >= diagonal - left) &&
           (right < 0 || column <= diagonal + right);
  }

  size_t QueryAt(const Sequence& sequence, int64_t row, int64_t head) const {
    return ((sequence.query + row) * heads + head) * width;
  }

  size_t KeyAt(const Sequence& sequence, int64_t row, int64_t head) const {
    const int64_t key_head = head / (heads / key_heads);
    return ((sequence.key + row) * key_heads + key_head) * width;
  }

  size_t LseAt(const Sequence& sequence, int64_t row, int64_t head) const {
    return sequence.lse + head * lse_head + row;
  }
};

// Refuses what the kernels do not take.
ffi::ErrorOr<Problem> Describe(const ffi::AnyBuffer& query, const ffi::AnyBuffer& key,
                               const ffi::AnyBuffer& value,
                               const std::optional<Packing>& packing,
                               const Attributes& attributes);

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_FLASH_PROBLEM_H_
