// Communicators that compare the ranks' calls.
#include "tests/ffi/nccl_ranks.h"

namespace jaxcomm::testing {
namespace {

// One that compares calls, of three devices.
std::shared_ptr<Communicator> MakeChecked(double timeout_seconds = kHangSeconds) {
  Options options;
  options.size = 3;
  options.timeout = timeout_seconds;
  options.check = true;
  return Make(options);
}

TEST(ranks_that_disagree_all_hear_who_differs_from_most) {
  auto communicator = MakeChecked();
  const auto gather = FloatSite("all_gather", {1}, 1, 3);
  ForRanks(3, [&](int device) {
    Part part(device, device == 0 ? gather.get() : Psum::TheSite());
    const Status refused = part.Enqueue(*communicator);
    CHECK_FAILS(refused, "JAXCOMM_CHECK: ranks disagree: rank 0 calls all_gather(");
    CHECK_FAILS(refused, "where rank 1 calls all_reduce(float32[1])");
    CHECK_EQ(part.result[0], -1.0f);
  });
}

TEST(ranks_that_agree_go_on) {
  auto communicator = MakeChecked();
  ForRanks(3, [&](int device) {
    for (int call = 0; call < 2; ++call) {
      Psum sum(device);
      CHECK_OK(sum.Enqueue(*communicator));
      CHECK_EQ(sum.on.Synchronize(), cuda::kSuccess);
      CHECK_EQ(sum.result[0], 3.0f);
    }
  });
}

TEST_ALONE(a_rank_that_does_not_call_is_waited_for_until_the_timeout, EXIT_SUCCESS) {
  CHECK_FAILS(Psum(0).Enqueue(*MakeChecked(kExpires)), "not done after 1 s");
}

}  // namespace
}  // namespace jaxcomm::testing
