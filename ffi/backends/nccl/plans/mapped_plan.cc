#include "ffi/backends/nccl/plans/mapped_plan.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace jaxcomm {
namespace {

// Copy engines are slower at addresses that are not.
constexpr size_t kAlignment = 256;

size_t Aligned(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Where a rank's copies lie in what it stages, as if that were one piece.
struct Staged {
  std::vector<size_t> at;   // by copy
  std::vector<bool> first;  // whether no copy before is of the same bytes
  size_t bytes = 0;
};

Staged StagedBy(const PeerPlan::Part& part) {
  Staged staged;
  std::map<std::tuple<int, int64_t, int64_t, size_t, int64_t>, size_t> places;
  for (const Step& copy : part.copies) {
    const auto [place, is_new] = places.try_emplace(
        {copy.leaf, copy.from, copy.from_pitch, copy.count, copy.rows}, staged.bytes);
    staged.at.push_back(place->second);
    staged.first.push_back(is_new);
    if (is_new) staged.bytes += Aligned(static_cast<size_t>(copy.bytes()));
  }
  return staged;
}

// Calls `add(part, done)` for each part of `bytes` of a copy's bytes from `begin` on:
// the end of a row, whole rows, and the beginning of one. `done`: bytes before it.
template <typename Add>
void CutRows(const Step& copy, size_t begin, size_t bytes, const Add& add) {
  const size_t end = begin + bytes;
  for (size_t at = begin; at < end;) {
    const size_t row = at / copy.count, into = at % copy.count;
    const size_t whole = into == 0 ? (end - at) / copy.count : 0;
    Step part = copy;
    part.from +=
        static_cast<int64_t>(row) * copy.from_pitch + static_cast<int64_t>(into);
    part.to += static_cast<int64_t>(row) * copy.to_pitch + static_cast<int64_t>(into);
    part.rows = static_cast<int64_t>(std::max(whole, size_t{1}));
    if (whole == 0) part.count = std::min(copy.count - into, end - at);
    add(part, at - begin);
    at += static_cast<size_t>(part.bytes());
  }
}

// Calls `add(chunk, at, part)` for each part of a copy that is staged at `begin`, cut
// where slots end.
template <typename Add>
void Cut(size_t begin, const Step& copy, size_t slot_bytes, const Add& add) {
  const auto bytes = static_cast<size_t>(copy.bytes());
  for (size_t done = 0; done < bytes;) {
    const size_t at = (begin + done) % slot_bytes;
    const size_t now = std::min(bytes - done, slot_bytes - at);
    CutRows(copy, done, now, [&](const Step& part, size_t before) {
      add((begin + done) / slot_bytes, static_cast<int64_t>(at + before), part);
    });
    done += now;
  }
}

}  // namespace

MappedPlan MakeMappedPlan(const PeerPlan& plan, int rank, size_t slot_bytes) {
  MappedPlan made;
  const int size = static_cast<int>(plan.parts.size());
  std::vector<Staged> staged;
  size_t most = 0;
  for (const PeerPlan::Part& part : plan.parts) {
    staged.push_back(StagedBy(part));
    most = std::max(most, staged.back().bytes);
  }
  made.is_pushed = plan.moves_along_pairs;
  made.local = plan.parts[rank].local;
  made.chunks.resize((most + slot_bytes - 1) / slot_bytes);
  const PeerPlan::Part& own = plan.parts[rank];
  for (size_t i = 0; i < own.copies.size(); ++i) {
    const Step& copy = own.copies[i];
    Cut(staged[rank].at[i], copy, slot_bytes, [&](size_t chunk, int64_t at, Step part) {
      AddOnce(made.chunks[chunk].targets, copy.peer);
      if (!staged[rank].first[i]) return;
      part.to = at;
      part.to_pitch = static_cast<int64_t>(part.count);
      made.chunks[chunk].stages.push_back(part);
    });
  }
  // Each begins with another source, so that no two pull from one at a time.
  for (int distance = 1; distance < size; ++distance) {
    const int source = (rank + distance) % size;
    const std::vector<Step>& copies = plan.parts[source].copies;
    for (size_t i = 0; i < copies.size(); ++i) {
      if (copies[i].peer != rank) continue;
      Cut(staged[source].at[i], copies[i], slot_bytes,
          [&](size_t chunk, int64_t at, Step part) {
            AddOnce(made.chunks[chunk].sources, source);
            part.peer = source;
            part.from = at;
            part.from_pitch = static_cast<int64_t>(part.count);
            made.chunks[chunk].pulls.push_back(part);
          });
    }
  }
  return made;
}

}  // namespace jaxcomm
