// Collectives whose moves depend on numbers that devices hold: ragged_all_to_all. What
// comes of them, and what does not fit: tests/collectives, over the stand-in.
#include <array>
#include <map>

#include "ffi/backends/nccl/failure/device_stop.h"
#include "ffi/xla/handler.h"
#include "tests/ffi/nccl_ranks.h"

namespace jaxcomm::testing {
namespace {

// Rows of three floats, of which rank r sends three to itself and r + 1 to the other.
constexpr int64_t kRows = 8, kRow = 3;

CallSite* TheSite() {
  const Leaf rows{DataType::F32, {kRows, kRow}, kRows * kRow, sizeof(float)};
  const Leaf numbers{DataType::S32, {2}, 2, sizeof(int32_t)};
  static CallSite* const site =
      MakeSite("ragged_all_to_all", {},
               {rows, rows, numbers, numbers, numbers, numbers}, {rows})
          .release();
  return site;
}

struct Ragged {
  explicit Ragged(int rank)
      : on(rank), rank(rank), data(kRows * kRow), result(kRows * kRow) {
    sizes[rank] = 3;
    sizes[1 - rank] = rank + 1;
    expected = {rank == 0 ? 3 : 1, rank == 0 ? 2 : 3};
    starts = {1, 4};
    places = {0, 4};
    if (rank == 0) places = {4, 0};
    operands = {data.data(),  result.data(), starts.data(),
                sizes.data(), places.data(), expected.data()};
    results[0] = result.data();
  }
  ~Ragged() { on.Synchronize(); }

  Status Enqueue(Communicator& communicator) {
    return communicator.Enqueue(
        Call{TheSite(), 1, 1, 1, rank, operands.data(), results, nullptr}, on.stream);
  }

  OnDevice on;
  const int rank;
  std::vector<float> data, result;
  std::array<int32_t, 2> starts, sizes, places, expected;
  std::array<const void*, 6> operands;
  void* results[1];
};

TEST(each_slice_is_sent_in_its_own_size) {
  const auto communicator = Make();
  TheFake().clear_trace();
  ForRanks(2, [&](int rank) {
    Ragged ragged(rank);
    CHECK_OK(ragged.Enqueue(*communicator));
    ragged.on.Synchronize();
  });
  // Of 12 bytes a row, once to each.
  CHECK_EQ(Count("ncclSend"), 2);
  for (const char* sent : {"\"count\": 12, \"type\": 0, \"peer\": 1",
                           "\"count\": 24, \"type\": 0, \"peer\": 0"}) {
    CHECK_CONTAINS(std::string(TheFake().trace()), sent);
  }
}

TEST(what_the_lowering_does_not_make_is_refused) {
  Options options;
  options.size = 3;
  options.groups = {{100, 101}, {102}};
  const auto communicator = Make(options);
  Ragged ragged(0);
  const auto enqueue = [&](CallSite* site, int device) {
    return communicator->Enqueue(
        Call{site, 1, 1, 1, device, ragged.operands.data(), ragged.results, nullptr},
        ragged.on.stream);
  };
  CHECK_FAILS(enqueue(TheSite(), 2), "a group has one rank");
  const Leaf rows = FloatLeaf(1), numbers{DataType::S32, {1026}, 1026, sizeof(int32_t)};
  const auto many = MakeSite("ragged_all_to_all", {},
                             {rows, rows, numbers, numbers, numbers, numbers}, {rows});
  CHECK_FAILS(enqueue(many.get(), 0), "16416 bytes, and at most 16384 are read");
  CHECK_TRUE(IsIdle(*communicator));
}

// The watch sees that the numbers of a rank do not come.
void WaitForARankThatDoesNotCome(OnFailure on_failure) {
  Options options;
  options.timeout = kExpires;
  options.on_failure = on_failure;
  const auto communicator = Make(options);
  Ragged ragged(0);
  CHECK_FAILS(ragged.Enqueue(*communicator),
              "rank 0 of 2 (device 100): not done after");
  CHECK_EQ(ragged.on.Synchronize(),
           on_failure == OnFailure::kRaise ? kStopped : cuda::kSuccess);
}

TEST_ALONE(a_rank_that_does_not_come_is_waited_for_until_the_timeout, EXIT_SUCCESS) {
  WaitForARankThatDoesNotCome(OnFailure::kRaise);
}
TEST_ALONE(likewise_where_results_are_poisoned, EXIT_SUCCESS) {
  WaitForARankThatDoesNotCome(OnFailure::kPoison);
}

// The others have given NCCL their numbers, and would wait for this rank's.
TEST_ALONE(without_memory_for_numbers_the_communicator_fails, EXIT_SUCCESS) {
  Options options;
  options.on_failure = OnFailure::kPoison;
  const auto communicator = Make(options);
  TheFake().fail("cuMemAlloc_v2", 0, cuda::kOutOfMemory);
  ForRanks(2, [&](int rank) {
    Ragged ragged(rank);
    CHECK_FAILS(ragged.Enqueue(*communicator), "ragged_all_to_all");
    ragged.on.Synchronize();
  });
  Ragged later(0);
  CHECK_FAILS(later.Enqueue(*communicator), "cuMemAlloc");
}

TEST(a_graph_never_records_it) {
  std::map<std::string, XLA_FFI_Handler*> execute;
  for (const Registration& each : Registrations(/*has_streams=*/true)) {
    for (const auto& [stage, handler] : each.stages) {
      if (std::string(stage) == "execute") execute[each.target] = handler;
    }
  }
  const auto differ = [&](const std::string& target) {
    return execute.at(target) != execute.at(target + ".capturable");
  };
  CHECK_TRUE(differ("jaxcomm.all_reduce"));
  CHECK_TRUE(!differ("jaxcomm.ragged_all_to_all"));
}

}  // namespace
}  // namespace jaxcomm::testing
