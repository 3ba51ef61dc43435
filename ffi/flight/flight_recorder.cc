#include "ffi/flight/flight_recorder.h"

#include <algorithm>
#include <tuple>

namespace jaxcomm {
namespace {

constexpr int kStateBits = 2;
constexpr uint64_t kStateMask = (uint64_t{1} << kStateBits) - 1;
// A ticket is a ring (20 bits: a million ranks) and a sequence number (44 bits: five
// years of 100,000 operations a second).
constexpr int kSequenceBits = 44;
constexpr uint64_t kSequenceMask = (uint64_t{1} << kSequenceBits) - 1;
// The entry was not made. Sequence numbers begin with 1.
constexpr FlightRecorder::Ticket kNoTicket = 0;

uint64_t Outcome(uint64_t ticks_or_sequence, FlightRecorder::State state) {
  return (ticks_or_sequence << kStateBits) | static_cast<uint64_t>(state);
}

}  // namespace

FlightRecorder::FlightRecorder(const std::vector<std::vector<int64_t>>& groups) {
  for (const auto& devices : groups) {
    first_ring_.push_back(num_rings_);
    num_rings_ += static_cast<int>(devices.size());
  }
  mask_ = EntriesOf(num_rings_) - 1;
  rings_ = std::make_unique<Ring[]>(num_rings_);
  for (size_t group = 0; group < groups.size(); ++group) {
    for (size_t rank = 0; rank < groups[group].size(); ++rank) {
      Ring& ring = rings_[first_ring_[group] + rank];
      ring.group = static_cast<int>(group);
      ring.rank = static_cast<int>(rank);
      ring.device = groups[group][rank];
    }
  }
}

FlightRecorder::~FlightRecorder() {
  for (int i = 0; i < num_rings_; ++i) delete[] rings_[i].slots.load();
}

FlightRecorder::Slot* FlightRecorder::MakeSlots(Ring& ring) {
  auto made = std::make_unique<Slot[]>(mask_ + 1);
  Slot* current = nullptr;
  // Another thread may have been first: use its slots.
  if (ring.slots.compare_exchange_strong(current, made.get())) return made.release();
  return current;
}

FlightRecorder::Ticket FlightRecorder::Start(uint32_t operation, int64_t run_id,
                                             uint64_t tag, int group, int rank) {
  const int index = first_ring_[group] + rank;
  Ring& ring = rings_[index];
  const uint64_t sequence = ring.count.fetch_add(1, std::memory_order_relaxed) + 1;
  Slot* slots = ring.slots.load(std::memory_order_acquire);
  if (slots == nullptr) slots = MakeSlots(ring);
  Slot& slot = slots[sequence & mask_];
  // A thread that was delayed here for a whole turn of the ring writes nothing: an
  // entry may be missing, but never mixes two operations.
  uint64_t version = slot.version.load(std::memory_order_relaxed);
  if (version % 2 == 1 || version > 2 * sequence ||
      !slot.version.compare_exchange_strong(version, 2 * sequence - 1,
                                            std::memory_order_acquire,
                                            std::memory_order_relaxed)) {
    return kNoTicket;
  }
  // Released one by one: a reader that sees any of these sees the odd version too.
  slot.run_id.store(run_id, std::memory_order_release);
  slot.tag.store(tag, std::memory_order_release);
  slot.started.store(Ticks(), std::memory_order_release);
  slot.outcome.store(Outcome(sequence, State::kStarted), std::memory_order_release);
  slot.operation.store(operation, std::memory_order_release);
  slot.version.store(2 * sequence, std::memory_order_release);
  return (static_cast<uint64_t>(index) << kSequenceBits) | (sequence & kSequenceMask);
}

void FlightRecorder::SetRun(Ticket ticket, int64_t run_id) {
  if (ticket == kNoTicket) return;
  const uint64_t sequence = ticket & kSequenceMask;
  const Ring& ring = rings_[ticket >> kSequenceBits];
  Slot& slot = ring.slots.load(std::memory_order_acquire)[sequence & mask_];
  // The rank is still in this operation, so only a ring as short as the number of its
  // operations in flight could be overwritten here.
  if (slot.version.load(std::memory_order_acquire) == 2 * sequence) {
    slot.run_id.store(run_id, std::memory_order_release);
  }
}

void FlightRecorder::Finish(Ticket ticket, State state) {
  if (ticket == kNoTicket) return;
  const uint64_t sequence = ticket & kSequenceMask;
  const Ring& ring = rings_[ticket >> kSequenceBits];
  Slot& slot = ring.slots.load(std::memory_order_acquire)[sequence & mask_];
  // Not a plain store: another operation may have taken the slot.
  uint64_t expected = Outcome(sequence, State::kStarted);
  slot.outcome.compare_exchange_strong(expected, Outcome(Ticks(), state),
                                       std::memory_order_release,
                                       std::memory_order_relaxed);
}

std::vector<FlightRecorder::Entry> FlightRecorder::Snapshot() const {
  const OperationTable& operations = OperationTable::Get();
  std::vector<Entry> entries;
  const TickScale::Reading scale = scale_.Read();
  for (int i = 0; i < num_rings_; ++i) {
    const Ring& ring = rings_[i];
    const Slot* slots = ring.slots.load(std::memory_order_acquire);
    if (slots == nullptr) continue;
    for (uint64_t k = 0; k <= mask_; ++k) {
      const Slot& slot = slots[k];
      const uint64_t version = slot.version.load(std::memory_order_acquire);
      if (version == 0 || version % 2 == 1) continue;
      Entry entry;
      entry.sequence = version / 2;
      entry.run_id = slot.run_id.load(std::memory_order_acquire);
      entry.tag = slot.tag.load(std::memory_order_acquire);
      const uint64_t started = slot.started.load(std::memory_order_acquire);
      const uint64_t outcome = slot.outcome.load(std::memory_order_acquire);
      const uint32_t operation = slot.operation.load(std::memory_order_acquire);
      if (slot.version.load(std::memory_order_relaxed) != version) continue;
      entry.operation = &operations.At(operation);
      entry.group = ring.group;
      entry.rank = ring.rank;
      entry.device = ring.device;
      entry.state = static_cast<State>(outcome & kStateMask);
      entry.started = scale.UnixSeconds(started);
      if (entry.state != State::kStarted) {
        entry.seconds = scale.Seconds(started, outcome >> kStateBits);
      }
      entries.push_back(entry);
    }
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.started, a.group, a.rank, a.sequence) <
           std::tie(b.started, b.group, b.rank, b.sequence);
  });
  return entries;
}

uint64_t FlightRecorder::EntriesOf(int64_t ranks) {
  // A power of two, so that a mask finds the slot.
  uint64_t entries = kEntries;
  while (entries > kLeastEntries && entries * static_cast<uint64_t>(ranks) > kEntries) {
    entries /= 2;
  }
  return entries;
}

int64_t FlightRecorder::host_bytes() const {
  int64_t used = 0;
  for (int i = 0; i < num_rings_; ++i) {
    used += rings_[i].slots.load(std::memory_order_relaxed) != nullptr;
  }
  return static_cast<int64_t>(sizeof(FlightRecorder)) +
         num_rings_ * static_cast<int64_t>(sizeof(Ring)) +
         used * static_cast<int64_t>(EntriesOf(num_rings_) * sizeof(Slot));
}

}  // namespace jaxcomm
