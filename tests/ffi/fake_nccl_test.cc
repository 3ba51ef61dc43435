// The stand-in for libnccl: what its operations compute, with ranks as threads, against
// a plain loop in double or 64-bit integers.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "tests/ffi/check.h"
#include "tests/ffi/fake_nccl.h"

namespace jaxcomm::testing {
namespace {

#include "ffi/backends/host/small_float.h"

using nccl::kSuccess;
using nccl::RedOp;
using nccl::Type;

const nccl::Api& Nccl() { return TheFake().nccl; }

template <typename T>
constexpr bool kIsSmall = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;

template <typename T>
double ToDouble(T value) {
  if constexpr (kIsSmall<T>) {
    return Widen(value);
  } else {
    return static_cast<double>(value);
  }
}

template <typename T>
T FromDouble(double value) {
  if constexpr (kIsSmall<T>) {
    T out;
    Narrow(static_cast<float>(value), &out);
    return out;
  } else {
    return static_cast<T>(value);
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
std::vector<T> Values(int rank, size_t count, size_t from = 0) {
  std::vector<T> out;
  for (size_t i = 0; i < count; ++i)
    out.push_back(FromDouble<T>(Value(rank, from + i)));
  return out;
}

template <typename T>
bool Holds(const std::vector<T>& data, const std::function<double(size_t)>& expected) {
  for (size_t i = 0; i < data.size(); ++i) {
    if (ToDouble(data[i]) != expected(i)) return false;
  }
  return true;
}

template <typename T>
void CheckReductions(Type type, Rank r, size_t count) {
  const size_t all = count * static_cast<size_t>(r.size);
  const std::vector<T> mine = Values<T>(r.rank, all);
  for (const RedOp op : {RedOp::kSum, RedOp::kProd, RedOp::kMax, RedOp::kMin}) {
    const auto expected = [&](size_t i) { return Reduced(op, r.size, i); };
    std::vector<T> out(all);
    Nccl().AllReduce(mine.data(), out.data(), all, type, op, r.comm, r.stream());
    r.on->Synchronize();
    CHECK_TRUE(Holds<T>(out, expected));
    std::vector<T> in_place = mine;
    Nccl().AllReduce(in_place.data(), in_place.data(), all, type, op, r.comm,
                     r.stream());
    r.on->Synchronize();
    CHECK_TRUE(Holds<T>(in_place, expected));

    const int root = r.size - 1;
    std::vector<T> at_root(r.rank == root ? all : 0);
    Nccl().Reduce(mine.data(), at_root.data(), all, type, op, root, r.comm, r.stream());
    r.on->Synchronize();
    CHECK_TRUE(Holds<T>(at_root, expected));

    const size_t start = count * static_cast<size_t>(r.rank);
    const auto expected_block = [&](size_t i) { return expected(start + i); };
    std::vector<T> block(count);
    Nccl().ReduceScatter(mine.data(), block.data(), count, type, op, r.comm,
                         r.stream());
    in_place = mine;
    Nccl().ReduceScatter(in_place.data(), in_place.data() + start, count, type, op,
                         r.comm, r.stream());
    r.on->Synchronize();
    CHECK_TRUE(Holds<T>(block, expected_block));
    std::copy_n(in_place.data() + start, count, block.data());
    CHECK_TRUE(Holds<T>(block, expected_block));
  }
}

template <typename T>
void CheckMoves(Type type, Rank r, size_t count) {
  const auto size = static_cast<size_t>(r.size);
  const auto rank = static_cast<size_t>(r.rank);
  const size_t all = count * size;
  const int root = r.size / 2;
  const std::vector<T> mine = Values<T>(r.rank, all);
  std::vector<T> broadcast(count), gathered(all), in_place(all), exchanged(all);
  std::vector<T> at_root(r.rank == root ? all : 0), scattered(count);
  std::copy_n(mine.data(), count, in_place.data() + rank * count);
  Nccl().GroupStart();
  Nccl().Broadcast(r.rank == root ? mine.data() : nullptr, broadcast.data(), count,
                   type, root, r.comm, r.stream());
  Nccl().AllGather(mine.data(), gathered.data(), count, type, r.comm, r.stream());
  Nccl().AllGather(in_place.data() + rank * count, in_place.data(), count, type, r.comm,
                   r.stream());
  Nccl().AlltoAll(mine.data(), exchanged.data(), count, type, r.comm, r.stream());
  Nccl().Gather(mine.data(), at_root.data(), count, type, root, r.comm, r.stream());
  Nccl().Scatter(r.rank == root ? mine.data() : nullptr, scattered.data(), count, type,
                 root, r.comm, r.stream());
  CHECK_EQ(Nccl().GroupEnd(), kSuccess);
  r.on->Synchronize();
  const auto from_all = [&](size_t i) {
    return Value(static_cast<int>(i / count), i % count);
  };
  CHECK_TRUE(Holds<T>(broadcast, [&](size_t i) { return Value(root, i); }));
  CHECK_TRUE(Holds<T>(gathered, from_all));
  CHECK_TRUE(Holds<T>(in_place, from_all));
  CHECK_TRUE(Holds<T>(at_root, from_all));
  CHECK_TRUE(
      Holds<T>(scattered, [&](size_t i) { return Value(root, rank * count + i); }));
  CHECK_TRUE(Holds<T>(exchanged, [&](size_t i) {
    return Value(static_cast<int>(i / count), rank * count + i % count);
  }));

  // To the next and from the last but one, and to oneself.
  std::vector<T> received(count), own(count);
  Nccl().GroupStart();
  Nccl().Send(mine.data(), count, type, (r.rank + 1) % r.size, r.comm, r.stream());
  Nccl().Send(mine.data(), count, type, r.rank, r.comm, r.stream());
  const int left = (r.rank + r.size - 1) % r.size;
  // With one rank both pairs are the same, and keep their order.
  Nccl().Recv(received.data(), count, type, left, r.comm, r.stream());
  Nccl().Recv(own.data(), count, type, r.rank, r.comm, r.stream());
  CHECK_EQ(Nccl().GroupEnd(), kSuccess);
  r.on->Synchronize();
  CHECK_TRUE(Holds<T>(received, [&](size_t i) { return Value(left, i); }));
  CHECK_TRUE(Holds<T>(own, [&](size_t i) { return Value(r.rank, i); }));
}

template <typename T>
void CheckType(Type type) {
  for (int size = 1; size <= 4; ++size) {
    RunRanks(size, [&](Rank r) {
      for (const size_t count : {0, 1, 7}) {
        CheckReductions<T>(type, r, count);
        CheckMoves<T>(type, r, count);
      }
      CHECK_EQ(AsyncErrorOf(r.comm), kSuccess);
    });
  }
}

TEST(every_operation_computes_what_a_plain_loop_does) {
  CheckType<int8_t>(Type::kInt8);
  CheckType<uint8_t>(Type::kUint8);
  CheckType<int32_t>(Type::kInt32);
  CheckType<uint32_t>(Type::kUint32);
  CheckType<int64_t>(Type::kInt64);
  CheckType<uint64_t>(Type::kUint64);
  CheckType<Float16>(Type::kFloat16);
  CheckType<float>(Type::kFloat32);
  CheckType<double>(Type::kFloat64);
  CheckType<BFloat16>(Type::kBfloat16);
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
    const int peer = 1 - r.rank;
    nccl::Comm other = nullptr;
    Nccl().CommSplit(r.comm, 0, 0, &other, nullptr);
    OnDevice second(r.rank), third(r.rank);
    int8_t sent = 1, received = 0, unused = 0;
    Gate gate;
    TheFake().cuda.LaunchHostFunc(second.stream, &Gate::Wait, &gate);
    TheFake().cuda.MemsetD8Async(reinterpret_cast<uintptr_t>(&sent), 7, 1,
                                 second.stream);
    Nccl().GroupStart();
    Nccl().Send(&sent, 1, Type::kInt8, peer, r.comm, r.stream());
    Nccl().Recv(&received, 1, Type::kInt8, peer, r.comm, second.stream);
    Nccl().GroupEnd();
    // Time enough for a launch that does not wait for the second stream.
    for (int i = 0; i < 20; ++i) {
      Nccl().AllReduce(&unused, &unused, 1, Type::kInt8, RedOp::kMax, other,
                       third.stream);
      third.Synchronize();
    }
    gate.open = true;
    second.Synchronize();
    CHECK_EQ(int{received}, 7);
    Nccl().CommDestroy(other);
  });
}

TEST(what_comes_of_two_ranks_keeps_its_order_and_the_rest_does_not_wait) {
  RunRanks(3, [](Rank r) {
    std::array<int32_t, 4> sent{}, received{};
    for (size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<int32_t>(10 + i);
    Nccl().GroupStart();
    // Rank 0 receives first from the one that sends to it last.
    const std::array order{r.rank == 0 ? 2 : 0, r.rank == 0 ? 1 : 0};
    for (size_t i = 0; i < 4; ++i) {
      const int peer = order[i / 2];
      if (r.rank == 0) {
        Nccl().Recv(&received[i], 1, Type::kInt32, peer, r.comm, r.stream());
      } else if (i < 2) {
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
