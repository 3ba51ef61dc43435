// Groups that span processes, with the processes played by communicators of their own
// over one segment: each sees the others through shared memory only.
#ifndef JAXCOMM_TESTS_FFI_PROCESSES_H_
#define JAXCOMM_TESTS_FFI_PROCESSES_H_

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "ffi/backends/host/arena.h"
#include "ffi/backends/host/local_communicator.h"
#include "ffi/backends/host/process_set.h"
#include "tests/ffi/check.h"
#include "tests/ffi/ranks.h"

namespace jaxcomm::testing {

// Rank r, device 100 + r, lives in process process_of[r].
struct Processes {
  explicit Processes(std::vector<int> process_of, double timeout_seconds = 60,
                     std::vector<Peer> peers = {})
      : process_of(std::move(process_of)) {
    count = *std::max_element(this->process_of.begin(), this->process_of.end()) + 1;
    segment = Must(Segment::Create(Arena::Bytes(count), false));
    Arena::Format(*segment);
    if (peers.empty()) {
      for (int process = 0; process < count; ++process) {
        peers.push_back({0, 0, process});  // of pid 0: not watched
      }
    }
    for (int process = 0; process < count; ++process) {
      Start(process, timeout_seconds, peers);
    }
  }

  // Process 0 has the shorter patience, and is the only one to have little.
  void Start(int process, double timeout_seconds, const std::vector<Peer>& peers) {
    std::vector<int64_t> devices;
    for (size_t r = 0; r < process_of.size(); ++r) devices.push_back(100 + r);
    if (process > 0) timeout_seconds = std::max(2 * timeout_seconds, 60.0);
    CommunicatorSpec spec = Spec({devices}, timeout_seconds);
    spec.process_set = std::make_shared<ProcessSet>(segment, peers, process);
    spec.processes = {process_of};
    communicators.push_back(MakeLocalCommunicator(std::move(spec)));
  }

  Communicator& of(int rank) { return *communicators[process_of[rank]]; }
  int size() const { return static_cast<int>(process_of.size()); }

  std::vector<int> process_of;
  int count = 0;
  std::shared_ptr<Segment> segment;
  std::vector<std::shared_ptr<Communicator>> communicators;
};

// Call sites of one place in the program: one for each process, as in life.
struct Site {
  Site(const std::string& collective, std::vector<int64_t> params,
       std::vector<Leaf> operands, std::vector<Leaf> results, int processes) {
    for (int i = 0; i < processes; ++i) {
      of.push_back(MakeSite(collective, params, operands, results));
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

// Calls of one place each, by rank.
struct Calls {
  Calls(Processes& processes, const std::string& collective,
        std::vector<int64_t> params, int64_t elements, int run, uint64_t tag = 1)
      : processes(processes),
        site(collective, params, {FloatLeaf(elements)}, {FloatLeaf(elements)},
             processes.count),
        run(run),
        tag(tag) {
    for (int r = 0; r < processes.size(); ++r)
      buffers.emplace_back(elements, elements, r);
    outcomes.resize(processes.size());
  }
  void Begin(int rank) {
    const int process = processes.process_of[rank];
    buffers[rank].Arrive(processes.of(rank), site.of[process].get(), run, 100 + rank,
                         nullptr, &outcomes[rank], tag);
  }
  void BeginAll() {
    for (int rank = 0; rank < processes.size(); ++rank) Begin(rank);
  }
  std::string End(int rank) { return outcomes[rank].Wait(); }

  Processes& processes;
  Site site;
  int run;
  uint64_t tag;
  std::deque<RankBuffers> buffers;
  std::deque<Outcome> outcomes;
};

}  // namespace jaxcomm::testing

#endif  // JAXCOMM_TESTS_FFI_PROCESSES_H_
