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
  std::map<std::tuple<int, int64_t, size_t>, size_t> places;
  for (const PeerPlan::Copy& copy : part.copies) {
    const auto [place, is_new] =
        places.try_emplace({copy.leaf, copy.from, copy.bytes}, staged.bytes);
    staged.at.push_back(place->second);
    staged.first.push_back(is_new);
    if (is_new) staged.bytes += Aligned(copy.bytes);
  }
  return staged;
}

void AddOnce(std::vector<int>& ranks, int rank) {
  if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) ranks.push_back(rank);
}

// Calls `add(chunk, at, offset, bytes)` for each part of what lies at `begin`, cut
// where slots end.
template <typename Add>
void Cut(size_t begin, size_t bytes, size_t slot_bytes, const Add& add) {
  for (size_t done = 0; done < bytes;) {
    const size_t at = (begin + done) % slot_bytes;
    const size_t now = std::min(bytes - done, slot_bytes - at);
    add((begin + done) / slot_bytes, at, static_cast<int64_t>(done), now);
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
  made.local = plan.parts[rank].local;
  made.chunks.resize((most + slot_bytes - 1) / slot_bytes);
  const PeerPlan::Part& own = plan.parts[rank];
  for (size_t i = 0; i < own.copies.size(); ++i) {
    const PeerPlan::Copy& copy = own.copies[i];
    Cut(staged[rank].at[i], copy.bytes, slot_bytes,
        [&](size_t chunk, size_t at, int64_t offset, size_t bytes) {
          AddOnce(made.chunks[chunk].targets, copy.target);
          if (!staged[rank].first[i]) return;
          made.chunks[chunk].stages.push_back(
              {copy.leaf, copy.from + offset, at, bytes});
        });
  }
  // Each begins with another source, so that no two pull from one at a time.
  for (int distance = 1; distance < size; ++distance) {
    const int source = (rank + distance) % size;
    const std::vector<PeerPlan::Copy>& copies = plan.parts[source].copies;
    for (size_t i = 0; i < copies.size(); ++i) {
      if (copies[i].target != rank) continue;
      Cut(staged[source].at[i], copies[i].bytes, slot_bytes,
          [&](size_t chunk, size_t at, int64_t offset, size_t bytes) {
            AddOnce(made.chunks[chunk].sources, source);
            made.chunks[chunk].pulls.push_back(
                {source, at, copies[i].leaf, copies[i].to + offset, bytes});
          });
    }
  }
  return made;
}

}  // namespace jaxcomm
