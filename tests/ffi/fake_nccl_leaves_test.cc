// Tests what NCCL reduces, in the full range of its integers, and calls of many arrays.
#include <algorithm>
#include <limits>

#include "tests/ffi/nccl_ranks.h"

namespace jaxcomm::testing {
namespace {

// One rank's reduction of arrays of one number each.
template <typename T>
struct Arrays {
  Arrays(int device, DataType dtype, std::vector<T> numbers,
         ReduceOp op = ReduceOp::kSum)
      : on(device), device(device), numbers(std::move(numbers)) {
    results.assign(this->numbers.size(), 99);
    const std::vector<Leaf> leaves(results.size(), {dtype, {1}, 1, sizeof(T)});
    site = MakeSite("all_reduce", {}, leaves, leaves, op);
    for (size_t i = 0; i < results.size(); ++i) {
      from.push_back(&this->numbers[i]);
      to.push_back(&results[i]);
    }
  }
  ~Arrays() { on.Synchronize(); }

  void Enqueue(Communicator& communicator) {
    const Call call{site.get(), 1, 1, 1, device, from.data(), to.data(), nullptr};
    CHECK_OK(communicator.Enqueue(call, on.stream));
  }

  OnDevice on;
  const int device;
  std::vector<T> numbers, results;
  std::unique_ptr<CallSite> site;
  std::vector<const void*> from;
  std::vector<void*> to;
};

template <typename T>
void ReduceInFullRange(Communicator& communicator, DataType dtype) {
  constexpr T kLeast = std::numeric_limits<T>::min();
  constexpr T kMost = std::numeric_limits<T>::max();
  const std::vector<T> numbers{kLeast, 1, kMost / 2, kMost / 2 + 1, kMost - 1, kMost};
  const size_t count = numbers.size();
  for (ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kSum}) {
    std::vector<T> rotated = numbers;
    for (size_t by = 0; by < count; ++by) {
      std::rotate(rotated.begin(), rotated.begin() + 1, rotated.end());
      Arrays<T> first(0, dtype, numbers, op), second(1, dtype, rotated, op);
      for (Arrays<T>* each : {&first, &second}) each->Enqueue(communicator);
      for (Arrays<T>* each : {&first, &second}) each->on.Synchronize();
      for (size_t i = 0; i < count; ++i) {
        const T a = numbers[i], b = rotated[i];
        const T sum =
            static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
        const T expected = op == ReduceOp::kSum   ? sum
                           : op == ReduceOp::kMax ? std::max(a, b)
                                                  : std::min(a, b);
        CHECK_TRUE(first.results[i] == expected);
        CHECK_TRUE(second.results[i] == expected);
      }
    }
  }
}

TEST(integers_are_reduced_in_their_full_range) {
  const auto communicator = Make();
  ReduceInFullRange<int8_t>(*communicator, DataType::S8);
  ReduceInFullRange<uint8_t>(*communicator, DataType::U8);
  ReduceInFullRange<int32_t>(*communicator, DataType::S32);
  ReduceInFullRange<uint32_t>(*communicator, DataType::U32);
  ReduceInFullRange<int64_t>(*communicator, DataType::S64);
  ReduceInFullRange<uint64_t>(*communicator, DataType::U64);
}

// A kernel that poisons takes some of them.
TEST_ALONE(all_results_of_a_call_are_poisoned, EXIT_SUCCESS) {
  Options options;
  options.timeout = kExpires;
  const auto communicator = Make(options);
  const std::vector<int32_t> numbers(2 * PoisonArguments::kMostPoisoned + 1, 1);
  Arrays<int32_t> waits(0, DataType::S32, numbers);
  waits.Enqueue(*communicator);
  waits.on.Synchronize();
  for (int32_t result : waits.results) CHECK_EQ(result, -1);
}

}  // namespace
}  // namespace jaxcomm::testing
