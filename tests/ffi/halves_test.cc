// The start of a split-phase collective, as the handler of "jaxcomm.<name>.start" asks
// for it. Its end, "jaxcomm.done", has nothing left to do.
#include <deque>
#include <vector>

#include "ffi/backends/host/local_communicator.h"
#include "tests/ffi/check.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

struct Rank {
  explicit Rank(float value) : operand(2, value), result(2, -1.0f) {}

  Call CallOf(CallSite* site, int64_t device_id) {
    operands = {operand.data()};
    results = {result.data()};
    return Call{site, 1, 1, 1, device_id, operands.data(), results.data(), nullptr};
  }

  std::vector<float> operand, result;
  std::vector<const void*> operands;
  std::vector<void*> results;
};

TEST(a_start_ends_when_the_result_is_there) {
  auto communicator = MakeLocalCommunicator(Spec({{100, 101}}));
  auto site = MakeSite("all_reduce", {}, {FloatLeaf(2)}, {FloatLeaf(2)});
  std::deque<Rank> ranks;
  ranks.emplace_back(1.0f);
  ranks.emplace_back(2.0f);
  std::deque<Outcome> starts(2);
  starts[0].Watch(communicator->Execute(ranks[0].CallOf(site.get(), 100)));
  // XLA keeps the buffers of rank 0 for as long as rank 1 may write to them.
  CHECK_TRUE(!starts[0].done());
  starts[1].Watch(communicator->Execute(ranks[1].CallOf(site.get(), 101)));
  for (int r = 0; r < 2; ++r) {
    CHECK_EQ(starts[r].Wait(), "");
    for (float value : ranks[r].result) CHECK_EQ(value, 3.0f);
  }
}

TEST(a_start_that_nobody_joins_fails_when_the_communicator_ends) {
  auto communicator = MakeLocalCommunicator(Spec({{100, 101}}));
  auto site = MakeSite("all_reduce", {}, {FloatLeaf(2)}, {FloatLeaf(2)});
  Rank rank(1.0f);
  Outcome outcome;
  outcome.Watch(communicator->Execute(rank.CallOf(site.get(), 100)));
  communicator->Abort(FailedPrecondition("closed"));
  CHECK_CONTAINS(outcome.Wait(), "closed");
}

}  // namespace
}  // namespace jaxcomm::testing
