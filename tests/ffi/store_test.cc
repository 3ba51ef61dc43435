#include "ffi/backends/host/store.h"

#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "tests/ffi/check.h"

namespace jaxcomm::testing {
namespace {

constexpr unsigned char kUntouched = 0xa5;

// Both ways of writing, whatever the size and wherever the buffers begin and end.
const Store kStores[] = {Store::IntoCaches(), Store::PastCaches()};
const int64_t kSizes[] = {0,    1,     63,        64,         4095,    4096,
                          4097, 65536, 65536 + 4, 200000 + 4, 3 << 16, (3 << 16) - 4};
const int kOffsets[] = {0, 4, 60, 64, 100};

// `size` bytes at an odd place, with a margin that nobody may write.
struct Buffer {
  Buffer(int64_t size, int offset)
      : bytes(size + offset + 256, kUntouched), offset(offset + 64), size(size) {}
  unsigned char* data() { return bytes.data() + offset; }
  bool MarginIsUntouched() const {
    for (int64_t i = 0; i < static_cast<int64_t>(bytes.size()); ++i) {
      const bool inside = i >= offset && i < offset + size;
      if (!inside && bytes[i] != kUntouched) return false;
    }
    return true;
  }
  std::vector<unsigned char> bytes;
  int64_t offset;
  int64_t size;
};

TEST(every_target_gets_a_copy) {
  for (const Store& store : kStores) {
    for (int64_t size : kSizes) {
      for (int offset : kOffsets) {
        Buffer source(size, 128 - offset);
        std::iota(source.data(), source.data() + size, static_cast<unsigned char>(7));
        Buffer first(size, offset), second(size, 0);
        void* const targets[] = {first.data(), second.data()};
        store.Copy(targets, 2, source.data(), size);
        for (Buffer* target : {&first, &second}) {
          CHECK_TRUE(std::memcmp(target->data(), source.data(), size) == 0);
          CHECK_TRUE(target->MarginIsUntouched());
        }
      }
    }
  }
}

TEST(every_target_gets_the_reduction) {
  std::mt19937 random(1);
  for (DataType dtype : {DataType::F32, DataType::BF16, DataType::S8, DataType::C128}) {
    const auto width = static_cast<int64_t>(ElementBytes(dtype));
    const ReduceKernels kernels = FindReduceKernels(dtype, ReduceOp::kSum);
    for (const Store& store : kStores) {
      for (int64_t size : kSizes) {
        for (int offset : {0, 16, 48}) {
          const int64_t elements = size / width;
          std::vector<Buffer> inputs(3, Buffer(elements * width, 64 - offset));
          const void* sources[3];
          for (int i = 0; i < 3; ++i) {
            // Without the top bit of an exponent nothing is NaN.
            for (int64_t k = 0; k < elements * width; ++k) {
              inputs[i].data()[k] = static_cast<unsigned char>(random() & 0xbf);
            }
            sources[i] = inputs[i].data();
          }
          // Not a vector of that size: at 0 its data() is null, which memcmp() forbids.
          Buffer expected(elements * width, 0);
          kernels.reduce(expected.data(), sources, 3, elements);
          Buffer first(elements * width, offset), second(elements * width, 0);
          void* targets[] = {first.data(), second.data()};
          store.Reduce(kernels, targets, 2, sources, 3, elements, width);
          for (Buffer* target : {&first, &second}) {
            CHECK_TRUE(std::memcmp(target->data(), expected.data(), expected.size) ==
                       0);
            CHECK_TRUE(target->MarginIsUntouched());
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace jaxcomm::testing
