// The stand-in for libnccl: what its operations compute, with ranks as threads, against
// a plain loop in double.
#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>

#include "tests/ffi/check.h"
#include "tests/ffi/fake_nccl.h"

namespace jaxcomm::testing {
namespace {

#include "ffi/backends/host/reduce/small_float.h"

using nccl::kSuccess;
using nccl::RedOp;
using nccl::Type;

template <typename T>
double ToDouble(T value) {
  if constexpr (std::is_arithmetic_v<T>) {
    return static_cast<double>(value);
  } else {
    return Widen(value);
  }
}

template <typename T>
T FromDouble(double value) {
  if constexpr (std::is_arithmetic_v<T>) {
    return static_cast<T>(value);
  } else {
    T out;
    Narrow(static_cast<float>(value), &out);
    return out;
  }
}

// Exact in every type, also the product over four ranks, which is 24.
double Value(int rank, size_t i) { return static_cast<double>((rank * 5 + i) % 4 + 1); }

double Reduced(RedOp op, int size, size_t i) {
  double out = Value(0, i);
  for (int rank = 1; rank < size; ++rank) {
    const double value = Value(rank, i);
    out = op == RedOp::kSum    ? out + value
          : op == RedOp::kProd ? out * value
          : op == RedOp::kMax  ? std::max(out, value)
                               : std::min(out, value);
  }
  return out;
}

template <typename T>
std::vector<T> Values(int rank, size_t count) {
  std::vector<T> out;
  for (size_t i = 0; i < count; ++i) out.push_back(FromDouble<T>(Value(rank, i)));
  return out;
}

template <typename T, typename Expected>
bool Holds(const std::vector<T>& data, const Expected& expected) {
  for (size_t i = 0; i < data.size(); ++i) {
    if (ToDouble(data[i]) != expected(i)) return false;
  }
  return true;
}

template <typename T>
void CheckReductions(Type type, Rank r, size_t count) {
  const size_t all = count * static_cast<size_t>(r.size);
  const size_t start = count * static_cast<size_t>(r.rank);
  const int root = r.size - 1;
  const std::vector<T> mine = Values<T>(r.rank, all);
  for (const RedOp op : {RedOp::kSum, RedOp::kProd, RedOp::kMax, RedOp::kMin}) {
    const auto expected = [&](size_t i) { return Reduced(op, r.size, i); };
    const auto expected_block = [&](size_t i) { return expected(start + i); };
    std::vector<T> out(all), in_place = mine, at_root(r.rank == root ? all : 0);
    std::vector<T> block(count), scattered = mine;
    const auto comm = r.comm;
    const auto stream = r.stream();
    Nccl().AllReduce(mine.data(), out.data(), all, type, op, comm, stream);
    Nccl().AllReduce(in_place.data(), in_place.data(), all, type, op, comm, stream);
    Nccl().Reduce(mine.data(), at_root.data(), all, type, op, root, comm, stream);
    Nccl().ReduceScatter(mine.data(), block.data(), count, type, op, comm, stream);
    Nccl().ReduceScatter(scattered.data(), scattered.data() + start, count, type, op,
                         comm, stream);
    r.on->Synchronize();
    for (const auto* whole : {&out, &in_place, &at_root}) {
      CHECK_TRUE(Holds(*whole, expected));
    }
    CHECK_TRUE(Holds(block, expected_block));
    std::copy_n(scattered.data() + start, count, block.data());
    CHECK_TRUE(Holds(block, expected_block));
  }
}

void CheckMoves(Rank r, size_t count) {
  const auto size = static_cast<size_t>(r.size), rank = static_cast<size_t>(r.rank);
  const size_t all = count * size;
  const int root = r.size / 2;
  const Type type = Type::kInt32;
  const auto comm = r.comm;
  const auto stream = r.stream();
  const std::vector<int32_t> mine = Values<int32_t>(r.rank, all);
  const int32_t* const of_root = r.rank == root ? mine.data() : nullptr;
  std::vector<int32_t> broadcast(count), gathered(all), in_place(all), exchanged(all);
  std::vector<int32_t> at_root(r.rank == root ? all : 0), scattered(count);
  std::copy_n(mine.data(), count, in_place.data() + rank * count);
  // To the next and from the last but one, and to oneself. With one rank both pairs are
  // the same, and keep their order.
  std::vector<int32_t> received(count), own(count);
  const int left = (r.rank + r.size - 1) % r.size, right = (r.rank + 1) % r.size;
  Nccl().GroupStart();
  Nccl().Broadcast(of_root, broadcast.data(), count, type, root, comm, stream);
  Nccl().AllGather(mine.data(), gathered.data(), count, type, comm, stream);
  Nccl().AllGather(in_place.data() + rank * count, in_place.data(), count, type, comm,
                   stream);
  Nccl().AlltoAll(mine.data(), exchanged.data(), count, type, comm, stream);
  Nccl().Gather(mine.data(), at_root.data(), count, type, root, comm, stream);
  Nccl().Scatter(of_root, scattered.data(), count, type, root, comm, stream);
  Nccl().Send(mine.data(), count, type, right, comm, stream);
  Nccl().Send(mine.data(), count, type, r.rank, comm, stream);
  Nccl().Recv(received.data(), count, type, left, comm, stream);
  Nccl().Recv(own.data(), count, type, r.rank, comm, stream);
  CHECK_EQ(Nccl().GroupEnd(), kSuccess);
  r.on->Synchronize();
  const auto of = [&](int from, size_t block) {
    return [=](size_t i) { return Value(from, block * count + i); };
  };
  const auto from_all = [&](size_t i) {
    return Value(static_cast<int>(i / count), i % count);
  };
  for (const auto* whole : {&gathered, &in_place, &at_root}) {
    CHECK_TRUE(Holds(*whole, from_all));
  }
  CHECK_TRUE(Holds(broadcast, of(root, 0)));
  CHECK_TRUE(Holds(scattered, of(root, rank)));
  CHECK_TRUE(Holds(exchanged, [&](size_t i) {
    return Value(static_cast<int>(i / count), rank * count + i % count);
  }));
  CHECK_TRUE(Holds(received, of(left, 0)));
  CHECK_TRUE(Holds(own, of(r.rank, 0)));
}

TEST(every_operation_computes_what_a_plain_loop_does) {
  for (int size : {1, 2, 4}) {
    RunRanks(size, [&](Rank r) {
      for (const size_t count : {0, 1, 7}) CheckMoves(r, count);
      CheckReductions<int8_t>(Type::kInt8, r, 3);
      CheckReductions<uint8_t>(Type::kUint8, r, 3);
      CheckReductions<int32_t>(Type::kInt32, r, 0);
      CheckReductions<int32_t>(Type::kInt32, r, 7);
      CheckReductions<uint32_t>(Type::kUint32, r, 3);
      CheckReductions<int64_t>(Type::kInt64, r, 3);
      CheckReductions<uint64_t>(Type::kUint64, r, 3);
      CheckReductions<Float16>(Type::kFloat16, r, 3);
      CheckReductions<float>(Type::kFloat32, r, 3);
      CheckReductions<double>(Type::kFloat64, r, 3);
      CheckReductions<BFloat16>(Type::kBfloat16, r, 3);
      CHECK_EQ(AsyncErrorOf(r.comm), kSuccess);
    });
  }
}

TEST(sums_go_by_rank_and_round_after_each_step) {
  RunRanks(3, [](Rank r) {
    float wide = std::array{1e8f, 1.0f, -1e8f}[static_cast<size_t>(r.rank)];
    auto narrow = FromDouble<Float16>(r.rank == 0 ? 2048 : 1);
    Nccl().AllReduce(&wide, &wide, 1, Type::kFloat32, RedOp::kSum, r.comm, r.stream());
    Nccl().AllReduce(&narrow, &narrow, 1, Type::kFloat16, RedOp::kSum, r.comm,
                     r.stream());
    r.on->Synchronize();
    CHECK_EQ(wide, 0.0f);
    CHECK_EQ(ToDouble(narrow), 2048.0);
  });
}

TEST(a_group_on_two_streams_is_one_launch_that_waits_for_both) {
  RunRanks(2, [](Rank r) {
    OnDevice second(r.rank);
    int8_t sent = 1, received = 0;
    Gate gate;
    gate.Hold(second.stream);
    Cuda().MemsetD8Async(reinterpret_cast<uintptr_t>(&sent), 7, 1, second.stream);
    Nccl().GroupStart();
    Nccl().Send(&sent, 1, Type::kInt8, 1 - r.rank, r.comm, r.stream());
    Nccl().Recv(&received, 1, Type::kInt8, 1 - r.rank, r.comm, second.stream);
    Nccl().GroupEnd();
    LetOthersRun();
    gate.Open();
    second.Synchronize();
    CHECK_EQ(int{received}, 7);
  });
}

TEST(what_comes_of_two_ranks_keeps_its_order_and_the_rest_does_not_wait) {
  RunRanks(3, [](Rank r) {
    std::array<int32_t, 4> sent{10, 11}, received{};
    Nccl().GroupStart();
    // Rank 0 receives first from the one that sends to it last.
    for (size_t i = 0; i < (r.rank == 0 ? 4 : 2); ++i) {
      if (r.rank == 0) {
        Nccl().Recv(&received[i], 1, Type::kInt32, i < 2 ? 2 : 1, r.comm, r.stream());
      } else {
        Nccl().Send(&sent[i], 1, Type::kInt32, 0, r.comm, r.stream());
      }
    }
    Nccl().GroupEnd();
    r.on->Synchronize();
    if (r.rank == 0) CHECK_TRUE((received == std::array<int32_t, 4>{10, 11, 10, 11}));
  });
}

}  // namespace
}  // namespace jaxcomm::testing
