#include "ffi/backends/host/store_tuner.h"

#include "tests/ffi/check.h"

namespace jaxcomm::testing {
namespace {

constexpr int64_t kBytes = 128 << 10;

// Ticks of a write and of a read, by whether they go past the caches.
struct Machine {
  uint64_t write[2], read[2];
};
constexpr Machine kNear = {{8000, 14000}, {9000, 14000}};
constexpr Machine kFar = {{30000, 14000}, {60000, 15000}};

// Moves chunks; returns how many of them went past the caches.
int Move(StoreTuner& tuner, const Machine& machine, int chunks,
         int64_t bytes = kBytes) {
  int past = 0;
  for (int i = 0; i < chunks; ++i) {
    const bool way = tuner.NextPastCaches();
    past += way;
    // Now and then a thread loses its core.
    const uint64_t lost = i % 10 == 9 ? 10'000'000 : 0;
    tuner.Took(StoreTuner::kWrite, way, bytes, machine.write[way] + lost);
    tuner.Took(StoreTuner::kRead, way, bytes, machine.read[way] + lost);
  }
  return past;
}

TEST(it_finds_the_better_way_and_tries_the_other_seldom) {
  StoreTuner near;
  Move(near, kNear, 200);
  CHECK_TRUE(Move(near, kNear, 640) == 10);
  StoreTuner far;
  Move(far, kFar, 200);
  CHECK_TRUE(Move(far, kFar, 640) == 630);
}

TEST(it_follows_cores_that_change_places) {
  StoreTuner tuner;
  Move(tuner, kNear, 5000);
  for (int turn = 0; turn < 3; ++turn) {
    Move(tuner, kFar, 300);
    CHECK_TRUE(Move(tuner, kFar, 640) == 630);
    Move(tuner, kNear, 3000);
    CHECK_TRUE(Move(tuner, kNear, 640) == 10);
  }
}

TEST(empty_chunks_say_nothing) {
  StoreTuner tuner;
  Move(tuner, kFar, 300);
  Move(tuner, kNear, 5000, 0);
  CHECK_TRUE(Move(tuner, kFar, 64) == 63);
}

}  // namespace
}  // namespace jaxcomm::testing
