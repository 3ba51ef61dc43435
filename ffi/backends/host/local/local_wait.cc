#include "ffi/backends/host/local/local_wait.h"

#include <chrono>
#include <thread>

#include "ffi/os/cores.h"

namespace jaxcomm {
namespace {

using Clock = LocalRound::Clock;

// Being woken takes longer than a small collective.
constexpr auto kSpin = std::chrono::microseconds(100);

// Total operand bytes from which on a rank that spins can help to move.
constexpr int64_t kLargeBytes = 256 << 10;

}  // namespace

bool ShouldSpin(const LocalRound& round, int ranks) {
  // The missing ranks come first.
  if (ranks - round.come >= Cores()) return false;
  const bool is_large = round.call_site->operand_bytes() * ranks >= kLargeBytes;
  const bool is_pairwise = round.plan != nullptr && round.plan->pairwise;
  return ranks <= Cores() || (is_large && is_pairwise);
}

void SpinAndHelp(const LocalParticipant& participant, const Offer& offer) {
  SharedBlocks* helped = nullptr;
  Clock::time_point end = Clock::now() + kSpin;
  for (int i = 1; !participant.is_complete.load(std::memory_order_acquire); ++i) {
    SharedBlocks* const blocks = offer.load(std::memory_order_acquire);
    if (blocks != nullptr && blocks != helped) {
      helped = blocks;
      blocks->Work();
      end = Clock::now() + kSpin;
    }
    Pause();
    if (i % 16 != 0) continue;
    if (Clock::now() >= end) break;
    // The program of a missing rank may need the core.
    std::this_thread::yield();
  }
}

}  // namespace jaxcomm
