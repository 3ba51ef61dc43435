// Attention one pair of rows at a time, as unkind as the kernels were read to be:
// * It refuses what they refuse, and what would have them read or write elsewhere.
// * What they leave undefined is NaN: scratch, rows of no sequence, and sequences that
//   are longer than the longest is said to be. Rows are 7 if JAXCOMM_FAKE_FLASH_NUMBERS
//   is set.
// * A weight of 0 times NaN is NaN, and the last tile of a sequence reaches into the
//   next one.
// * A row that sees no key has out 0. Its lse is -inf, but +inf where there are no keys
//   at all. Backward takes -inf for 0.
#ifndef JAXCOMM_TESTS_DOUBLES_FLASH_ATTENTION_H_
#define JAXCOMM_TESTS_DOUBLES_FLASH_ATTENTION_H_

#include <optional>

#include "tests/doubles/flash/problem.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm::fake {

struct ForwardResults {
  ffi::AnyBuffer out, lse;
  ffi::AnyBuffer spare_out, spare_lse;
};

struct BackwardOperands {
  ffi::AnyBuffer grad, query, key, value, out, lse;
};

struct BackwardResults {
  ffi::AnyBuffer query, key, value;
  ffi::AnyBuffer delta, lse;
};

ffi::Error Forward(ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer value,
                   const std::optional<Packing>& packing, const Attributes& attributes,
                   const ForwardResults& results);

ffi::Error Backward(const BackwardOperands& operands,
                    const std::optional<Packing>& packing, const Attributes& attributes,
                    const BackwardResults& results);

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_FLASH_ATTENTION_H_
