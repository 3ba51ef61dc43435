// Each call of NCCL and CUDA fails once, in each kind of operation: somebody is told,
// nobody hangs, no number leaves that is not right, and nothing stays open.
#include <cmath>
#include <functional>
#include <list>
#include <map>
#include <set>

#include "ffi/backends/nccl/failure/device_stop.h"
#include "ffi/backends/nccl/failure/process_failure.h"
#include "tests/ffi/nccl_ranks.h"

namespace jaxcomm::testing {
namespace {

// The failed call returns it: out of memory, or NCCL's system error.
constexpr int kFails = 2;
constexpr int kMostCalls = 400;

struct Kind {
  const char* name;
  Options options;
  std::function<std::unique_ptr<CallSite>()> site;
  bool is_split = false;  // in a start and a done
};

std::vector<Kind> Kinds() {
  Options ordinary, one_shot, copies, checked, alone;
  one_shot.one_shot = true;
  copies.copies = true;
  checked.check = true;
  const auto sum = [] { return SumSite(3); };
  const auto swap = [] { return FloatSite("permute", {1, 0}, 3); };
  const auto large = [] { return FloatSite("permute", {1, 0}, 1 << 20); };
  return {
      {"a sum", ordinary, sum},       {"a split-phase sum", ordinary, sum, true},
      {"sends", ordinary, swap},      {"a checked sum", checked, sum},
      {"a small sum", one_shot, sum}, {"a split-phase small sum", one_shot, sum, true},
      {"copies", copies, large, true}};
}

std::string Open() { return TheFake().open(); }

// What a rank of a call has, once its stream has come to the end.
struct Outcome {
  Status status = OkStatus();
  bool is_right = true, is_poisoned = true;
};

Outcome RunRank(Communicator& communicator, const Kind& kind, CallSite* site,
                Part& part) {
  Outcome outcome;
  outcome.status =
      kind.is_split ? part.Start(communicator) : part.Enqueue(communicator);
  if (kind.is_split && outcome.status.success())
    outcome.status = part.Done(communicator);
  // The call that fails may be this one.
  if (part.on.Synchronize() != cuda::kSuccess) part.on.Synchronize();
  // XLA reads no result of a call that returned an error.
  if (outcome.status.failure()) return outcome;
  for (size_t i = 0; i < part.result.size(); ++i) {
    const auto of = [&](int device) {
      return static_cast<float>(device * 7 % 5) + static_cast<float>(i);
    };
    const bool is_sum = site->kind() == Plan::Kind::kAllReduce;
    const float expected = is_sum ? of(0) + of(1) : of(1 - part.device);
    outcome.is_right &= part.result[i] == expected;
    outcome.is_poisoned &= std::isnan(part.result[i]);
  }
  return outcome;
}

// Returns whether a call failed.
bool Fail(const Kind& kind, int after) {
  // A stream of the communicator's may still be at them after a start that failed, and
  // nothing tells this thread when it is done. So they stay.
  static auto& buffers = *new std::list<std::vector<float>>;
  std::vector<float> operands[2], results[2];
  auto communicator = Make(kind.options);
  const auto site = kind.site();
  std::vector<Outcome> outcomes(2);
  std::atomic<int> ready{0};
  ForRanks(2, [&](int rank) {
    Part part(rank, site.get());
    // What the test itself calls does not fail.
    if (++ready == 2) {
      TheFake().fail("*", after, kFails);
      ++ready;
    }
    CHECK_TRUE(Until([&] { return ready == 3; }));
    outcomes[rank] = RunRank(*communicator, kind, site.get(), part);
    operands[rank] = std::move(part.operand);
    results[rank] = std::move(part.result);
  });
  for (auto* vectors : {operands, results}) {
    for (int rank = 0; rank < 2; ++rank) buffers.push_back(std::move(vectors[rank]));
  }
  const bool failed = TheFake().forget_faults() == 0;
  bool is_told = false;
  const std::string what = StrCat("call ", after, " of ", kind.name);
  for (const Outcome& outcome : outcomes) {
    is_told |= outcome.status.failure();
    const bool may_leave =
        outcome.status.failure() || outcome.is_right || outcome.is_poisoned;
    if (!may_leave) CHECK_EQ(what, "leaves no number");
  }
  if (failed && !is_told && ProcessFailure::Get().first().empty())
    CHECK_EQ(what, "tells that it failed");
  communicator->Abort(FailedPrecondition("closed"));
  ProcessFailure::Get().Forget();
  // Threads that abort keep it, too.
  const std::weak_ptr<Communicator> kept = communicator;
  communicator = nullptr;
  CHECK_TRUE(Until([&] { return kept.expired(); }));
  return failed;
}

TEST(each_call_of_an_operation_fails_once) {
  for (const Kind& kind : Kinds()) {
    Fail(kind, kMostCalls);  // what is made once for the process is made now
    const std::string before = Open();
    int calls = 0;
    while (calls < kMostCalls && Fail(kind, calls)) {
      if (!Until([&] { return Open() == before; })) {
        CHECK_EQ(StrCat("call ", calls, " of ", kind.name, ": ", Open()), before);
      }
      ++calls;
    }
    std::printf("       %d calls of %s\n", calls, kind.name);
    CHECK_TRUE(calls > 2 && calls < kMostCalls);
  }
}

// The functions in the trace whose failure their caller tells on, and how often each
// was called.
std::map<std::string, int> Called() {
  std::map<std::string, int> called;
  const std::string trace = TheFake().trace(), mark = "\"name\": \"";
  for (size_t at = 0; (at = trace.find(mark, at)) != std::string::npos;) {
    at += mark.size();
    const std::string name = trace.substr(at, trace.find('"', at) - at);
    if (TheFake().may_fail(name.c_str()) != 0) ++called[name];
  }
  return called;
}

ErrorOr<std::shared_ptr<Communicator>> TryToMake(const Kind& kind) {
  static const NcclLibrary library = Library();
  const nccl::UniqueId id = NewId();
  ASSIGN_OR_RETURN(auto world, NcclWorld::Create(library, 2, {{100, 0, 0}, {101, 1, 1}},
                                                 {id.internal, sizeof(id.internal)}, {},
                                                 {kHangSeconds}, {}));
  CommunicatorSpec spec = Spec({{100, 101}});
  spec.platform = "gpu";
  NcclSpec how{world,
               {},
               {kHangSeconds},
               {kind.options.copies, kind.options.one_shot},
               OnFailure::kPoison};
  how.check = kind.options.check;
  return MakeNcclCommunicator(std::move(spec), how);
}

// What cannot be had for a faster way is done by NCCL.
TEST(each_function_fails_in_a_creation) {
  for (const Kind& kind : Kinds()) {
    if (kind.is_split && !kind.options.copies) continue;
    TheFake().clear_trace();
    (void)Must(TryToMake(kind));
    const std::string before = Open();
    for (const auto& [function, times] : Called()) {
      for (int after : std::set<int>{0, times / 2, times - 1}) {
        TheFake().fail(function.c_str(), after, kFails);
        {
          const auto made = TryToMake(kind);
          TheFake().forget_faults();  // once for the process, and not again
          if (!made.has_error()) {
            const auto site = kind.site();
            ForRanks(2, [&](int rank) {
              Part part(rank, site.get());
              const Outcome outcome = RunRank(**made, kind, site.get(), part);
              CHECK_OK(outcome.status);
              CHECK_TRUE(outcome.is_right);
            });
          }
        }
        if (!Until([&] { return Open() == before; })) {
          CHECK_EQ(StrCat(function, " ", after, " of ", kind.name, ": ", Open()),
                   before);
        }
      }
    }
  }
}

}  // namespace
}  // namespace jaxcomm::testing
