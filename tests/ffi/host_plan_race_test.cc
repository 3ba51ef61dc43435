// Ranks of groups of different sizes ask one call site for its plan at the same time,
// for the first time: each must get one for its own group.
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "ffi/backends/host/host_plan.h"
#include "tests/ffi/check.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {
namespace {

// axis_index_groups=[[0, 1], [2, 3, 4], ...] gives such groups.
constexpr int kSizes[] = {2, 3, 5, 8};
constexpr int kSites = 300;

TEST(every_rank_gets_the_plan_of_its_own_group) {
  std::vector<std::unique_ptr<CallSite>> sites;
  for (int i = 0; i < kSites; ++i) {
    sites.push_back(MakeSite("all_reduce", {}, {FloatLeaf(8)}, {FloatLeaf(8)}));
  }
  std::atomic<int> arrived[kSites] = {};
  std::atomic<int> wrong{0};
  std::vector<std::thread> ranks;
  for (int size : kSizes) {
    ranks.emplace_back([&, size] {
      for (int i = 0; i < kSites; ++i) {
        // All at once, also where there are fewer cores.
        arrived[i].fetch_add(1);
        while (arrived[i].load() < static_cast<int>(std::size(kSizes))) {
          std::this_thread::yield();
        }
        for (int call = 0; call < 3; ++call) {
          const HostPlan* plan = nullptr;
          const Status status = FindHostPlan(*sites[i], size, &plan);
          if (status.failure() || plan->size != size || plan->moves.size() != 1 ||
              static_cast<int>(plan->moves[0].targets.size()) != size) {
            wrong.fetch_add(1);
          }
        }
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  CHECK_EQ(wrong.load(), 0);
}

}  // namespace
}  // namespace jaxcomm::testing
