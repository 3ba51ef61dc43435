// Groups of calls, and the launches that come of them on the streams' threads.
#include "tests/doubles/nccl/group.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "tests/doubles/nccl/call.h"
#include "tests/doubles/nccl/devices.h"
#include "tests/doubles/nccl/failed.h"
#include "tests/doubles/nccl/operation.h"
#include "tests/doubles/nccl/streams.h"

namespace jaxcomm::fake {
namespace {

// Those between the same two ranks in the same direction keep their order, and
// collectives keep theirs; the rest need not wait for each other.
using Queue = std::tuple<bool, Kind, int>;

Queue QueueOf(const Operation& operation) {
  const bool one_sided = operation.kind == kSend || operation.kind == kRecv;
  return one_sided ? Queue{true, operation.kind, operation.peer}
                   : Queue{false, kAllReduce, kNobody};
}

bool AnyAborted(Room& room) {
  for (int rank = 0; rank < room.board().size; ++rank) {
    if (room.board().members[rank].aborted != 0) return true;
  }
  return false;
}

// On the stream's thread. `collective` is the number of the launch's first one.
void Run(Communicator& communicator, uint64_t collective,
         const std::vector<Operation>& operations) {
  Room& room = *communicator.room;
  std::vector<std::unique_ptr<Exchange>> exchanges;
  for (const Operation& operation : operations) {
    exchanges.push_back(MakeExchange(&room, communicator.rank, collective, operation));
    if (operation.kind != kSend && operation.kind != kRecv) ++collective;
  }
  Room::Lock lock(room);
  while (true) {
    bool advanced = false;
    bool all_done = true;
    std::set<Queue> occupied;
    // After a failure nothing moves until the abort, as in NCCL.
    const bool failed = room.board().failure != nccl::kSuccess;
    for (size_t i = 0; i < exchanges.size(); ++i) {
      Exchange& exchange = *exchanges[i];
      if (exchange.done()) continue;
      const bool first = occupied.insert(QueueOf(operations[i])).second;
      if (first && !failed && !operations[i].hangs && !communicator.Stopped()) {
        advanced |= exchange.Advance(&lock);
      }
      all_done &= exchange.done();
    }
    if (all_done) return;
    if (DeviceFailure() != cuda::kSuccess) break;
    if (communicator.Stopped()) {
      room.board().members[communicator.rank].aborted = 1;
      room.Ring();
      break;
    }
    // What a peer was aborted in ends here without a result.
    if (!advanced && AnyAborted(room)) break;
    if (!advanced) room.Wait(&lock);
  }
  for (const auto& exchange : exchanges) exchange->Withdraw(&lock);
}

}  // namespace

void Enqueue(Launch launch) {
  Communicator& communicator = *launch.communicator;
  const uint64_t collective = communicator.collectives + 1;
  for (const Operation& operation : launch.operations) {
    if (operation.kind != kSend && operation.kind != kRecv) ++communicator.collectives;
  }
  {
    std::lock_guard<std::mutex> lock(communicator.mutex);
    ++communicator.outstanding;
    if (CapturesHere()) communicator.graph = LastGraph();
  }
  Stream& stream = *launch.streams.front();
  for (size_t i = 1; i < launch.streams.size(); ++i) {
    stream.WaitFor(launch.streams[i]->Mark());
  }
  const uint64_t ticket = communicator.resources->TakeTicket();
  stream.Enqueue([collective, ticket, communicator = launch.communicator,
                  operations = std::move(launch.operations)] {
    if (communicator->resources->WaitForTurn(ticket)) {
      bool runs = false;
      {
        std::lock_guard<std::mutex> lock(communicator->mutex);
        runs = !communicator->Stopped();
        communicator->running += runs;
      }
      if (runs) Run(*communicator, collective, operations);
      communicator->resources->EndTurn(ticket);
      std::lock_guard<std::mutex> lock(communicator->mutex);
      communicator->running -= runs;
    }
    std::lock_guard<std::mutex> lock(communicator->mutex);
    --communicator->outstanding;
    communicator->changed.notify_all();
  });
  const std::shared_ptr<Moment> over = stream.Mark();
  for (size_t i = 1; i < launch.streams.size(); ++i) launch.streams[i]->WaitFor(over);
}

namespace {

struct Group {
  int depth = 0;
  uint64_t number = 0;
  std::vector<Job> jobs;
  std::vector<Launch> launches;  // one a communicator
  nccl::Result error = nccl::kSuccess;
  std::string text;
  int device = kNoDevice;  // of what came last

  ~Group() {
    if (depth > 0) Misuse("a thread ended within a group");
  }
};

thread_local Group group;

uint64_t NextNumber() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

void RunInBackground(Job job) {
  Communicator& communicator = *job.background;
  if (communicator.job.joinable()) communicator.job.join();
  communicator.SetState(nccl::kInProgress, "");
  communicator.job = std::thread([job = std::move(job)] {
    const nccl::Result result = job.run();
    job.background->SetState(result, LastFailure());
  });
}

// All at once: those of ranks that one thread drives wait for each other.
nccl::Result RunAll(std::vector<Job> jobs) {
  nccl::Result outcome = nccl::kSuccess;
  std::vector<std::thread> threads;
  std::vector<nccl::Result> results(jobs.size(), nccl::kSuccess);
  std::vector<std::string> texts(jobs.size());
  for (size_t i = 0; i < jobs.size(); ++i) {
    if (jobs[i].background != nullptr) {
      RunInBackground(jobs[i]);
      outcome = nccl::kInProgress;
      continue;
    }
    threads.emplace_back([&, i] {
      results[i] = jobs[i].run();
      texts[i] = LastFailure();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = jobs.size(); i-- > 0;) {
    if (results[i] == nccl::kSuccess) continue;
    jobs[i].undo();
    outcome = Failure(results[i], texts[i]);
  }
  return outcome;
}

bool Connects(const Launch& launch) {
  return std::any_of(launch.operations.begin(), launch.operations.end(),
                     [](const Operation& each) { return each.connects; });
}

// As NCCL does where it connects to ranks whose processes do not come. It looks at its
// sockets and its abort flag, and at no device.
nccl::Result ConnectUntilAborted(const std::vector<Launch>& launches) {
  const auto stopped = [](const Launch& launch) {
    return launch.communicator->Stopped();
  };
  while (std::none_of(launches.begin(), launches.end(), stopped)) {
    std::this_thread::sleep_for(kLook);
  }
  return Failure(nccl::kInternalError, "The communicator was aborted");
}

// NCCL sets the device of each rank, and not always that of the caller again if one
// fails.
void Leave(const Group& group) {
  if (group.device != kNoDevice) SetDevice(group.device);
}

void TraceLaunch(const Launch& launch, uint64_t number) {
  TraceEntry entry{"launch"};
  entry.comm = launch.communicator->number;
  entry.count = static_cast<int64_t>(launch.operations.size());
  entry.group = number;
  Trace(entry);
}

}  // namespace

nccl::Result Submit(Job job) {
  if (group.depth > 0) {
    group.device = RuntimeDevice();
    group.jobs.push_back(std::move(job));
    return nccl::kSuccess;
  }
  if (job.background != nullptr) {
    RunInBackground(std::move(job));
    return nccl::kInProgress;
  }
  const nccl::Result result = job.run();
  if (result != nccl::kSuccess) job.undo();
  return result;
}

nccl::Result Submit(const std::shared_ptr<Communicator>& communicator,
                    const Operation& operation, const std::shared_ptr<Stream>& stream) {
  if (group.depth == 0) {
    Launch launch{communicator, {operation}, {stream}};
    if (Connects(launch)) return ConnectUntilAborted({launch});
    TraceLaunch(launch, 0);
    Enqueue(std::move(launch));
    return nccl::kSuccess;
  }
  group.device = RuntimeDevice();
  auto& launches = group.launches;
  auto launch = std::find_if(
      launches.begin(), launches.end(),
      [&](const Launch& other) { return other.communicator == communicator; });
  if (launch == launches.end()) {
    launch = launches.insert(launch, Launch{communicator, {}, {}});
  }
  launch->operations.push_back(operation);
  auto& streams = launch->streams;
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
    streams.push_back(stream);
  }
  return nccl::kSuccess;
}

nccl::Result Spoil(nccl::Result result) {
  if (group.depth > 0 && group.error == nccl::kSuccess) {
    group.error = result;
    group.text = LastFailure();
  }
  return result;
}

uint64_t CurrentGroup() { return group.depth > 0 ? group.number : 0; }

}  // namespace jaxcomm::fake

namespace jaxcomm::nccl {

Result ncclGroupStart() {
  JAXCOMM_FAKE_CALL(kAllowed, "ncclGroupStart");
  if (fake::group.depth++ == 0) fake::group.number = fake::NextNumber();
  return kSuccess;
}

Result ncclGroupEnd() {
  if (fake::group.depth == 0) {
    fake::Misuse("a group ended that did not begin");
    return fake::Failure(kInvalidUsage, "ncclGroupEnd: not in a group call");
  }
  const fake::Call call({"ncclGroupEnd", 0, -1, -1, -1, -1, -1, fake::CurrentGroup()});
  if (call.refusal() != 0) fake::Spoil(static_cast<Result>(call.refusal()));
  if (--fake::group.depth > 0) return kSuccess;
  fake::Group ended;
  std::swap(ended, fake::group);
  if (ended.error != kSuccess) {
    for (const fake::Job& job : ended.jobs) job.undo();
    fake::Leave(ended);
    return fake::Failure(ended.error, ended.text);
  }
  const Result result = fake::RunAll(std::move(ended.jobs));
  if (result != kSuccess && result != kInProgress) {
    fake::Leave(ended);
    return result;
  }
  if (std::any_of(ended.launches.begin(), ended.launches.end(), fake::Connects)) {
    return fake::ConnectUntilAborted(ended.launches);
  }
  for (fake::Launch& launch : ended.launches) {
    fake::TraceLaunch(launch, ended.number);
    fake::Enqueue(std::move(launch));
  }
  return result;
}

}  // namespace jaxcomm::nccl
