// Groups that span processes, with the processes played by communicators of their own
// over one segment: each sees the others through shared memory only.
#ifndef JAXCOMM_TESTS_FFI_PROCESSES_H_
#define JAXCOMM_TESTS_FFI_PROCESSES_H_

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "ffi/backends/host/arena/arena.h"
#include "ffi/backends/host/arena/process_set.h"
#include "ffi/backends/host/local/local_communicator.h"
#include "tests/ffi/check.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {

inline std::shared_ptr<Segment> MakeSegment(int processes) {
  auto segment = Must(Segment::Create(Arena::Bytes(processes), false));
  Arena::Format(*segment);
  return segment;
}

// Processes that nobody watches: their pid is 0.
inline std::vector<Peer> Unwatched(int processes) {
  std::vector<Peer> peers;
  for (int process = 0; process < processes; ++process)
    peers.push_back({0, 0, process});
  return peers;
}

// The communicator of one process, or its spec. `processes`: of each rank, by group.
inline CommunicatorSpec SpecOf(std::shared_ptr<Segment> segment,
                               const std::vector<Peer>& peers, int process,
                               std::vector<std::vector<int64_t>> groups,
                               std::vector<std::vector<int>> processes,
                               double timeout_seconds = kHangSeconds,
                               Grace grace = Grace::OfThisProcess()) {
  CommunicatorSpec spec = Spec(std::move(groups), timeout_seconds);
  spec.process_set = std::make_shared<ProcessSet>(std::move(segment), peers, process,
                                                  std::move(grace));
  spec.processes = std::move(processes);
  return spec;
}

// Rank r, device 100 + r, lives in process process_of[r].
struct Processes {
  // Process 0 is the only one whose patience may be short.
  explicit Processes(
      std::vector<int> process_of, double timeout_seconds = kHangSeconds,
      std::vector<Peer> peers = {},
      const std::function<Grace(int process)>& grace_of =
          [](int) { return Grace::OfThisProcess(); })
      : process_of(std::move(process_of)) {
    count = *std::max_element(this->process_of.begin(), this->process_of.end()) + 1;
    segment = MakeSegment(count);
    if (peers.empty()) peers = Unwatched(count);
    std::vector<int64_t> devices;
    for (size_t r = 0; r < this->process_of.size(); ++r) devices.push_back(100 + r);
    for (int process = 0; process < count; ++process) {
      communicators.push_back(MakeLocalCommunicator(SpecOf(
          segment, peers, process, {devices}, {this->process_of},
          process == 0 ? timeout_seconds : 2 * kHangSeconds, grace_of(process))));
    }
  }

  Communicator& of(int rank) { return *communicators[process_of[rank]]; }
  const std::shared_ptr<ProcessSet>& set(int process) {
    return communicators[process]->spec().process_set;
  }
  int size() const { return static_cast<int>(process_of.size()); }

  std::vector<int> process_of;
  int count = 0;
  std::shared_ptr<Segment> segment;
  std::vector<std::shared_ptr<Communicator>> communicators;
};

// Call sites of one place in the program: one for each process, as in life.
struct Site {
  Site(const std::string& collective, std::vector<int64_t> params, int64_t elements,
       int processes) {
    for (int i = 0; i < processes; ++i) {
      of.push_back(FloatSite(collective, params, elements));
    }
  }
  std::vector<std::unique_ptr<CallSite>> of;
};

inline std::vector<int> Blocks(int processes, int ranks_each) {
  std::vector<int> process_of;
  for (int p = 0; p < processes; ++p)
    process_of.insert(process_of.end(), ranks_each, p);
  return process_of;
}

// Calls of one place, by rank. Rank r hands in r, in every element.
struct Calls {
  Calls(Processes& processes, const std::string& collective,
        std::vector<int64_t> params, int64_t elements, int run, uint64_t tag = 1)
      : processes(processes),
        site(collective, params, elements, processes.count),
        run(run),
        tag(tag),
        outcomes(processes.size()) {
    for (int r = 0; r < processes.size(); ++r)
      buffers.emplace_back(elements, elements, r);
  }
  void Begin(int rank) {
    const int process = processes.process_of[rank];
    buffers[rank].Arrive(processes.of(rank), site.of[process].get(), run, 100 + rank,
                         &outcomes[rank], tag);
  }
  void BeginAll() {
    for (int rank = 0; rank < processes.size(); ++rank) Begin(rank);
  }
  std::string End(int rank) { return outcomes[rank].Wait(); }
  void EndAll() {
    for (Outcome& outcome : outcomes) CHECK_EQ(outcome.Wait(), "");
  }

  Processes& processes;
  Site site;
  int run;
  uint64_t tag;
  std::deque<RankBuffers> buffers;
  std::deque<Outcome> outcomes;
};

}  // namespace jaxcomm::testing

#endif  // JAXCOMM_TESTS_FFI_PROCESSES_H_
