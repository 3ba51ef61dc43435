// What a process that ends stops in another one, and what it does not.
#include <string>

#include "ffi/backends/nccl/failure/device_stop.h"
#include "ffi/backends/nccl/failure/process_failure.h"
#include "tests/ffi/nccl_ranks.h"

namespace jaxcomm::testing {
namespace {

// Communicators of two devices of this process: `spanning` takes one of them for that
// of a process that may end.
struct BesideAProcess {
  BesideAProcess() {
    const nccl::UniqueId id = NewId();
    world = Must(NcclWorld::Create(Library(), 2, {{100, 0, 0}, {101, 1, 1}},
                                   {id.internal, sizeof(id.internal)}, {},
                                   {kHangSeconds}, {PeerOf(process.pid(), 1)}));
    spanning = MakeOf({{0, 1}});
    own = MakeOf({{0, 0}});
  }
  std::shared_ptr<Communicator> MakeOf(std::vector<std::vector<int>> processes) {
    CommunicatorSpec spec = Spec({{100, 101}});
    spec.processes = std::move(processes);
    NcclSpec how{world, {}, {kHangSeconds}, {}, OnFailure::kRaise};
    return Must(MakeNcclCommunicator(std::move(spec), how));
  }

  Child process;
  std::shared_ptr<NcclWorld> world;
  std::shared_ptr<Communicator> spanning, own;
};

TEST_ALONE(a_process_that_ends_leaves_others_to_their_work, EXIT_SUCCESS) {
  BesideAProcess beside;
  Psum first(0), second(1);
  CHECK_OK(first.Enqueue(*beside.own));
  beside.process.Kill();
  LetOthersRun();
  CHECK_EQ(ProcessFailure::Get().first(), "");
  CHECK_OK(second.Enqueue(*beside.own));
  for (Psum* sum : {&first, &second}) {
    CHECK_EQ(sum->on.Synchronize(), cuda::kSuccess);
    CHECK_EQ(sum->result[0], 2.0f);
  }
  CHECK_TRUE(Until([] { return !ProcessFailure::Get().first().empty(); }));
  CHECK_CONTAINS(ProcessFailure::Get().first(), "process 1 (rank 1) has ended");
  CHECK_TRUE(!DevicesAreStopped());
}

// It may be running, which nobody sees.
TEST_ALONE(a_process_that_ends_stops_what_a_graph_has_recorded, EXIT_SUCCESS) {
  BesideAProcess beside;
  Psum recorded(0);
  TheFake().set_capturing(recorded.on.stream, true);
  Call call = recorded.CallOf();
  call.may_be_captured = true;
  CHECK_OK(beside.spanning->Enqueue(call, recorded.on.stream));
  TheFake().set_capturing(recorded.on.stream, false);
  beside.process.Kill();
  CHECK_TRUE(Until([] { return DevicesAreStopped(); }));
}

}  // namespace
}  // namespace jaxcomm::testing
