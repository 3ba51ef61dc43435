// What a communicator keeps of call sites: each thing once, and no longer than its
// site.
#include "ffi/core/derived_cache.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

#include "tests/ffi/check.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

std::unique_ptr<CallSite> Site() {
  return MakeSite("all_reduce", {}, {FloatLeaf(1)}, {FloatLeaf(1)});
}

ErrorOr<int> Fail() { return FailedPrecondition("not yet"); }
ErrorOr<int> Seven() { return 7; }

TEST(what_could_not_be_made_of_a_site_is_asked_for_again) {
  DerivedCache<int> cache;
  const auto site = Site(), other = Site();
  CHECK_CONTAINS(cache.Find(*site, Fail).status().message(), "not yet");
  const int* const made = Must(cache.Find(*site, Seven));
  CHECK_EQ(*made, 7);
  CHECK_TRUE(Must(cache.Find(*site, Fail)) == made);
  CHECK_TRUE(cache.Find(*other, Fail).has_error());
}

TEST(what_was_made_stays_where_it_is) {
  DerivedCache<int> cache;
  std::vector<std::unique_ptr<CallSite>> sites;
  std::vector<const int*> made;
  for (int i = 0; i < 1000; ++i) {
    sites.push_back(Site());
    made.push_back(
        Must(cache.Find(*sites.back(), [i]() -> ErrorOr<int> { return i; })));
  }
  for (int i = 0; i < 1000; ++i) {
    CHECK_TRUE(Must(cache.Find(*sites[i], Fail)) == made[i]);
    CHECK_EQ(*made[i], i);
  }
}

TEST(ended_sites_leave_nothing_behind) {
  DerivedCache<int> cache;
  const auto site = Site();
  const int* const made = Must(cache.Find(*site, Seven));
  size_t most = 0;
  for (int i = 0; i < 1000; ++i) {
    Must(cache.Find(*Site(), Seven));
    most = std::max(most, cache.size());
  }
  CHECK_TRUE(most < 40);
  CHECK_TRUE(Must(cache.Find(*site, Fail)) == made);
}

}  // namespace
}  // namespace jaxcomm::testing
