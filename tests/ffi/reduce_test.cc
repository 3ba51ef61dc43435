// The host backend's arithmetic, and how it writes.
#include "ffi/backends/host/reduce/reduce.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "ffi/backends/host/reduce/store.h"
#include "tests/ffi/check.h"

namespace jaxcomm::testing {
namespace {

using Bytes = std::vector<unsigned char>;

// Without the top bit of an exponent nothing is NaN, whose payload depends on the order
// of operands that a compiler may swap.
void Fill(unsigned char* data, size_t bytes, DataType dtype, std::mt19937& random) {
  for (size_t i = 0; i < bytes; ++i) {
    data[i] =
        static_cast<unsigned char>(random() & (dtype == DataType::PRED ? 1 : 0xbf));
  }
}

// Every instruction set this processor has gives the same bits.
TEST(the_instruction_sets_agree) {
  std::mt19937 random(1);
  for (DataType dtype :
       {DataType::F32, DataType::BF16, DataType::F16, DataType::S8, DataType::S32,
        DataType::F64, DataType::C64, DataType::F8E4M3FN, DataType::PRED}) {
    for (ReduceOp op :
         {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMax, ReduceOp::kMin}) {
      if (dtype == DataType::C64 && op == ReduceOp::kProduct) {
        continue;  // contracted to a fused multiply-add where there is one
      }
      for (int64_t count : {1, 17, 1025}) {
        const size_t bytes = count * ElementBytes(dtype);
        std::vector<Bytes> inputs(5, Bytes(bytes));
        std::vector<const void*> pointers;
        for (Bytes& input : inputs) {
          Fill(input.data(), bytes, dtype, random);
          pointers.push_back(input.data());
        }
        Bytes expected(bytes), got(bytes);
        baseline::FindReduceKernels(dtype, op).reduce(expected.data(), pointers.data(),
                                                      5, count);
        FindReduceKernels(dtype, op).reduce(got.data(), pointers.data(), 5, count);
        CHECK_TRUE(expected == got);
      }
    }
  }
}

template <typename T>
T Reduce(DataType dtype, ReduceOp op, const std::vector<T>& values) {
  std::vector<const void*> inputs;
  for (const T& value : values) inputs.push_back(&value);
  T out{};
  FindReduceKernels(dtype, op).reduce(&out, inputs.data(),
                                      static_cast<int>(values.size()), 1);
  return out;
}

#if defined(__x86_64__)
TEST(subnormals_survive_threads_that_flush_them) {
  const unsigned int before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);  // flush to zero, denormals are zero: as XLA's threads
  const auto half = Reduce<uint16_t>(DataType::F16, ReduceOp::kSum, {0x0003, 0});
  const auto byte = Reduce<uint8_t>(DataType::F8E5M2, ReduceOp::kSum, {0x01, 0});
  const unsigned int after = _mm_getcsr();
  _mm_setcsr(before);
  CHECK_EQ(half, 0x0003);
  CHECK_EQ(int{byte}, 1);
  CHECK_EQ(after & 0x8040u, 0x8040u);
}
#endif

// Any number of terms whose sum depends on the order, by the definition of the tree.
TEST(sums_are_trees_and_so_are_their_prefixes) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> value(-1, 1);
  std::vector<float> values(64);
  for (float& each : values) each = std::ldexp(value(random), random() % 24);
  std::vector<const void*> in;
  std::vector<float> outputs(values.size());
  std::vector<void*> out;
  for (size_t i = 0; i < values.size(); ++i) {
    in.push_back(&values[i]);
    out.push_back(&outputs[i]);
  }
  FindReduceKernels(DataType::F32, ReduceOp::kSum)
      .running(out.data(), in.data(), 64, 1);
  int in_order = 0;
  for (size_t count = 1; count <= values.size(); ++count) {
    std::vector<float> level(values.begin(), values.begin() + count);
    in_order += std::accumulate(level.begin(), level.end(), 0.0f) == outputs[count - 1];
    while (level.size() > 1) {
      std::vector<float> above;
      for (size_t i = 0; i < level.size(); i += 2) {
        above.push_back(i + 1 < level.size() ? level[i] + level[i + 1] : level[i]);
      }
      level = above;
    }
    const std::vector<float> terms(values.begin(), values.begin() + count);
    CHECK_EQ((Reduce<float>(DataType::F32, ReduceOp::kSum, terms)), level[0]);
    CHECK_EQ(outputs[count - 1], level[0]);
  }
  CHECK_TRUE(in_order < 32);
  // What has no neighbour is no sum with zero.
  CHECK_TRUE(std::signbit(
      Reduce<float>(DataType::F32, ReduceOp::kSum, {-0.0f, -0.0f, -0.0f})));
}

constexpr unsigned char kUntouched = 0xa5;

// Both ways of writing, whatever the size and wherever the buffers begin and end.
const Store kStores[] = {Store::IntoCaches(), Store(/*touched=*/int64_t{1} << 40, 0)};
const int64_t kSizes[] = {0, 1, 63, 64, 4097, 65536 + 4, (3 << 16) - 4};

// `size` bytes at an odd place, with a margin that nobody may write.
struct Buffer {
  Buffer(int64_t size, int offset)
      : bytes(size + offset + 256, kUntouched), offset(offset + 64), size(size) {}
  unsigned char* data() { return bytes.data() + offset; }
  bool Holds(const unsigned char* wanted) const {
    for (int64_t i = 0; i < static_cast<int64_t>(bytes.size()); ++i) {
      const bool inside = i >= offset && i < offset + size;
      if (bytes[i] != (inside ? wanted[i - offset] : kUntouched)) return false;
    }
    return true;
  }
  Bytes bytes;
  int64_t offset;
  int64_t size;
};

TEST(every_target_gets_a_copy) {
  for (const Store& store : kStores) {
    for (int64_t size : kSizes) {
      for (int offset : {0, 4, 60, 64, 100}) {
        Buffer source(size, 128 - offset), first(size, offset), second(size, 0);
        std::iota(source.data(), source.data() + size, static_cast<unsigned char>(7));
        void* const targets[] = {first.data(), second.data()};
        store.Copy(targets, 2, source.data(), size);
        CHECK_TRUE(first.Holds(source.data()) && second.Holds(source.data()));
      }
    }
  }
}

TEST(every_target_gets_the_reduction) {
  std::mt19937 random(1);
  for (DataType dtype : {DataType::F32, DataType::S8, DataType::C128}) {
    const auto width = static_cast<int64_t>(ElementBytes(dtype));
    const ReduceKernels kernels = FindReduceKernels(dtype, ReduceOp::kSum);
    for (const Store& store : kStores) {
      for (int64_t size : kSizes) {
        for (int offset : {0, 16, 48}) {
          const int64_t elements = size / width, bytes = elements * width;
          std::vector<Buffer> inputs(3, Buffer(bytes, 64 - offset));
          const void* sources[3];
          for (int i = 0; i < 3; ++i) {
            Fill(inputs[i].data(), bytes, dtype, random);
            sources[i] = inputs[i].data();
          }
          Buffer expected(bytes, 0), first(bytes, offset), second(bytes, 0);
          kernels.reduce(expected.data(), sources, 3, elements);
          void* targets[] = {first.data(), second.data()};
          store.Reduce(kernels, targets, 2, sources, 3, elements, width);
          CHECK_TRUE(first.Holds(expected.data()) && second.Holds(expected.data()));
        }
      }
    }
  }
}

}  // namespace
}  // namespace jaxcomm::testing
