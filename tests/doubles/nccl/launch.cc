#include "tests/doubles/nccl/launch.h"

#include <set>
#include <tuple>
#include <utility>

#include "tests/doubles/nccl/capture.h"
#include "tests/doubles/nccl/exchange.h"
#include "tests/doubles/nccl/failed.h"

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

std::unique_ptr<Exchange> Make(Communicator& communicator, uint64_t collective,
                               const Operation& operation) {
  Room* const room = communicator.room.get();
  switch (operation.kind) {
    case kSend:
      return MakeSend(room, communicator.rank, operation);
    case kRecv:
      return MakeRecv(room, communicator.rank, operation);
    default:
      return MakeCollective(room, communicator.rank, collective, operation);
  }
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
    exchanges.push_back(Make(communicator, collective, operation));
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

}  // namespace jaxcomm::fake
