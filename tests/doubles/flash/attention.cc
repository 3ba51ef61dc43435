#include "tests/doubles/flash/attention.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/doubles/flash/problem.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm::fake {
namespace {

#include "ffi/backends/host/reduce/small_float.h"

using Values = std::vector<double>;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// What memory holds that nobody wrote: numbers as well as NaN.
double Unwritten() {
  return std::getenv("JAXCOMM_FAKE_FLASH_NUMBERS") == nullptr ? kNaN : 7;
}
constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <typename Small>
Values Widened(const void* data, size_t count) {
  Values values(count);
  for (size_t i = 0; i < count; ++i) {
    values[i] = Widen(static_cast<const Small*>(data)[i]);
  }
  return values;
}

Values Read(const ffi::AnyBuffer& buffer) {
  const void* const data = buffer.untyped_data();
  const size_t count = buffer.element_count();
  if (buffer.element_type() == ffi::DataType::BF16) {
    return Widened<BFloat16>(data, count);
  }
  if (buffer.element_type() == ffi::DataType::F16) {
    return Widened<Float16>(data, count);
  }
  const float* const floats = static_cast<const float*>(data);
  return Values(floats, floats + count);
}

template <typename Small>
void Narrowed(const Values& values, void* data) {
  for (size_t i = 0; i < values.size(); ++i) {
    Narrow(static_cast<float>(values[i]), static_cast<Small*>(data) + i);
  }
}

void Write(const Values& values, const ffi::AnyBuffer& buffer) {
  void* const data = buffer.untyped_data();
  if (buffer.element_type() == ffi::DataType::BF16) {
    Narrowed<BFloat16>(values, data);
  } else if (buffer.element_type() == ffi::DataType::F16) {
    Narrowed<Float16>(values, data);
  } else {
    std::copy(values.begin(), values.end(), static_cast<float*>(data));
  }
}

// All bits set are NaN in every floating-point type.
void Poison(const ffi::AnyBuffer& buffer) {
  if (buffer.size_bytes() > 0) {
    std::memset(buffer.untyped_data(), 0xff, buffer.size_bytes());
  }
}

double Dot(const Values& a, size_t i, const Values& b, size_t j, int64_t width) {
  double sum = 0;
  for (int64_t d = 0; d < width; ++d) sum += a[i + d] * b[j + d];
  return sum;
}

void AttendRow(const Problem& problem, const Sequence& sequence, int64_t row,
               int64_t head, const Values& query, const Values& key,
               const Values& value, Values* out, Values* lse) {
  const size_t at = problem.QueryAt(sequence, row, head);
  Values scores(sequence.key_reach, -kInfinity);
  double largest = -kInfinity;
  for (int64_t j = 0; j < sequence.key_reach; ++j) {
    if (!problem.Sees(sequence, row, j)) continue;
    const size_t key_at = problem.KeyAt(sequence, j, head);
    scores[j] = problem.scale * Dot(query, at, key, key_at, problem.width);
    largest = std::fmax(largest, scores[j]);
  }
  const double shift = largest == -kInfinity ? 0 : largest;
  Values summed(problem.width, 0.0);
  double total = 0;
  for (int64_t j = 0; j < sequence.key_reach; ++j) {
    const double weight = std::exp(scores[j] - shift);
    total += weight;
    const size_t value_at = problem.KeyAt(sequence, j, head);
    for (int64_t d = 0; d < problem.width; ++d) {
      summed[d] += weight * value[value_at + d];
    }
  }
  // NaN counts as no key too: lse does not tell of it.
  const bool sees_none = total == 0 || std::isnan(total);
  for (int64_t d = 0; d < problem.width; ++d) {
    (*out)[at + d] = summed[d] * (sees_none ? 0 : 1 / total);
  }
  (*lse)[problem.LseAt(sequence, row, head)] =
      sees_none ? -kInfinity : largest + std::log(total);
}

// What backward reads, and the gradients.
struct Gradients {
  Values grad, query, key, value, out, lse;
  Values of_query, of_key, of_value;
};

void Differentiate(const Problem& problem, const Sequence& sequence, int64_t head,
                   Gradients* all) {
  for (int64_t i = 0; i < sequence.query_reach; ++i) {
    const bool is_row = i < sequence.queries;
    const size_t at = problem.QueryAt(sequence, i, head);
    const double lse = is_row ? all->lse[problem.LseAt(sequence, i, head)] : kInfinity;
    const double shift = lse == -kInfinity ? 0 : lse;
    const double delta = is_row ? Dot(all->grad, at, all->out, at, problem.width) : 0;
    for (int64_t j = 0; j < sequence.key_reach; ++j) {
      const bool is_column = j < sequence.keys;
      const size_t key_at = problem.KeyAt(sequence, j, head);
      double weight = 0;
      if (problem.Sees(sequence, i, j)) {
        const double score = Dot(all->query, at, all->key, key_at, problem.width);
        weight = std::exp(problem.scale * score - shift);
      }
      const double of_weight = Dot(all->grad, at, all->value, key_at, problem.width);
      const double of_score = problem.scale * weight * (of_weight - delta);
      for (int64_t d = 0; d < problem.width; ++d) {
        if (is_row) all->of_query[at + d] += of_score * all->key[key_at + d];
        if (is_column) all->of_key[key_at + d] += of_score * all->query[at + d];
        if (is_column) all->of_value[key_at + d] += weight * all->grad[at + d];
      }
    }
  }
}

// Rows of a sequence are 0 before anything is added. All others stay NaN, unless there
// is nothing to compute at all.
void Clear(const Problem& problem, Gradients* all) {
  const int64_t query_row = problem.heads * problem.width;
  const int64_t key_row = problem.key_heads * problem.width;
  const bool has_all = problem.query_rows > 0 && problem.key_rows > 0;
  all->of_query.assign(problem.query_rows * query_row, has_all ? Unwritten() : 0.0);
  all->of_key.assign(problem.key_rows * key_row, has_all ? Unwritten() : 0.0);
  all->of_value = all->of_key;
  for (const Sequence& each : problem.sequences) {
    std::fill_n(all->of_query.begin() + each.query * query_row,
                each.queries * query_row, 0.0);
    std::fill_n(all->of_key.begin() + each.key * key_row, each.keys * key_row, 0.0);
    std::fill_n(all->of_value.begin() + each.key * key_row, each.keys * key_row, 0.0);
  }
}

}  // namespace

ffi::Error Forward(ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer value,
                   const std::optional<Packing>& packing, const Attributes& attributes,
                   const ForwardResults& results) {
  const auto problem = Describe(query, key, value, packing, attributes);
  if (!problem) return problem.error();
  if (!Is(results.out, problem->dtype, problem->query_shape) ||
      !Is(results.lse, ffi::DataType::F32, problem->lse_shape)) {
    return Refuse("out is not like query, or lse is not float32 of its shape");
  }
  Poison(results.spare_out);
  Poison(results.spare_lse);
  const bool computes = problem->key_rows > 0;
  Values outs(results.out.element_count(), computes ? Unwritten() : 0.0);
  Values lses(results.lse.element_count(), computes ? Unwritten() : kInfinity);
  if (computes) {
    const Values queries = Read(query), keys = Read(key), values = Read(value);
    for (const Sequence& each : problem->sequences) {
      for (int64_t row = 0; row < each.queries; ++row) {
        for (int64_t head = 0; head < problem->heads; ++head) {
          AttendRow(*problem, each, row, head, queries, keys, values, &outs, &lses);
        }
      }
    }
  }
  Write(outs, results.out);
  Write(lses, results.lse);
  return ffi::Error::Success();
}

ffi::Error Backward(const BackwardOperands& operands,
                    const std::optional<Packing>& packing, const Attributes& attributes,
                    const BackwardResults& results) {
  const auto& [grad, query, key, value, out, lse] = operands;
  const auto problem = Describe(query, key, value, packing, attributes);
  if (!problem) return problem.error();
  for (const ffi::AnyBuffer& each : {grad, out, results.query}) {
    if (!Is(each, problem->dtype, problem->query_shape)) {
      return Refuse("out, its gradient or that of the queries is not like query");
    }
  }
  for (const ffi::AnyBuffer& each : {results.key, results.value}) {
    if (!Is(each, problem->dtype, problem->key_shape)) {
      return Refuse("the gradient of key or value is not like key");
    }
  }
  if (!Is(lse, ffi::DataType::F32, problem->lse_shape)) {
    return Refuse("lse is not float32 of its shape");
  }
  for (const ffi::AnyBuffer& each : {results.delta, results.lse}) {
    if (each.element_type() != ffi::DataType::F32 ||
        static_cast<int64_t>(each.element_count()) < problem->scratch) {
      return Refuse("backward needs scratch of " + std::to_string(problem->scratch) +
                    " float32");
    }
    Poison(each);
  }
  // A GPU starts as many blocks along the second and third axis of a grid.
  if (problem->count > 65535 || problem->heads > 65535) {
    return Refuse("there are at most 65535 heads or sequences");
  }
  Gradients all{Read(grad), Read(query), Read(key), Read(value), Read(out),
                Read(lse),  {},          {},        {}};
  Clear(*problem, &all);
  for (const Sequence& each : problem->sequences) {
    for (int64_t head = 0; head < problem->heads; ++head) {
      Differentiate(*problem, each, head, &all);
    }
  }
  Write(all.of_query, results.query);
  Write(all.of_key, results.key);
  Write(all.of_value, results.value);
  return ffi::Error::Success();
}

}  // namespace jaxcomm::fake
