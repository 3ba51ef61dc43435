#include "ffi/backends/host/reduce.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "tests/ffi/check.h"

namespace jaxcomm::testing {
namespace {

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
      for (int64_t count : {1, 3, 17, 1025}) {
        const size_t bytes = count * ElementBytes(dtype);
        std::vector<std::vector<unsigned char>> inputs(
            5, std::vector<unsigned char>(bytes));
        for (auto& input : inputs) {
          for (auto& byte : input) {
            // Without the top bit of an exponent nothing is NaN, whose payload
            // depends on the order of operands that a compiler may swap.
            byte = static_cast<unsigned char>(random() &
                                              (dtype == DataType::PRED ? 1 : 0xbf));
          }
        }
        std::vector<const void*> pointers;
        for (auto& input : inputs) pointers.push_back(input.data());
        std::vector<unsigned char> expected(bytes), got(bytes);
        baseline::FindReduceKernels(dtype, op).reduce(expected.data(), pointers.data(),
                                                      5, count);
        FindReduceKernels(dtype, op).reduce(got.data(), pointers.data(), 5, count);
        CHECK_TRUE(std::memcmp(expected.data(), got.data(), bytes) == 0);
      }
    }
  }
}

TEST(float16_accumulates_in_float32) {
  // 2048 + 1 + 1 rounds to 2048 in float16 at each step, and to 2050 in float32.
  const uint16_t big = 0x6800, one = 0x3c00;
  const void* inputs[] = {&big, &one, &one};
  uint16_t sum = 0;
  FindReduceKernels(DataType::F16, ReduceOp::kSum).reduce(&sum, inputs, 3, 1);
  CHECK_EQ(sum, 0x6801);
}

#if defined(__x86_64__)
TEST(subnormals_survive_threads_that_flush_them) {
  const unsigned int before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);  // flush to zero, denormals are zero: as XLA's threads
  const uint16_t tiny = 0x0003, zero = 0;
  const uint8_t tiny8 = 0x01, zero8 = 0;
  const void* halves[] = {&tiny, &zero};
  const void* bytes[] = {&tiny8, &zero8};
  uint16_t half = 0xffff;
  uint8_t byte = 0xff;
  FindReduceKernels(DataType::F16, ReduceOp::kSum).reduce(&half, halves, 2, 1);
  FindReduceKernels(DataType::F8E5M2, ReduceOp::kSum).reduce(&byte, bytes, 2, 1);
  const unsigned int after = _mm_getcsr();
  _mm_setcsr(before);
  CHECK_EQ(half, 0x0003);
  CHECK_EQ(static_cast<int>(byte), 1);
  CHECK_EQ(after & 0x8040u, 0x8040u);
}
#endif

TEST(integers_wrap) {
  const int8_t a = 127, b = 1;
  const void* inputs[] = {&a, &b};
  int8_t sum = 0;
  FindReduceKernels(DataType::S8, ReduceOp::kSum).reduce(&sum, inputs, 2, 1);
  CHECK_EQ(static_cast<int>(sum), -128);
}

TEST(nan_wins_maximum_and_minimum) {
  const float nan = std::nanf(""), one = 1;
  for (ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin}) {
    float out = 0;
    const void* first[] = {&nan, &one};
    FindReduceKernels(DataType::F32, op).reduce(&out, first, 2, 1);
    CHECK_TRUE(std::isnan(out));
    const void* second[] = {&one, &nan};
    FindReduceKernels(DataType::F32, op).reduce(&out, second, 2, 1);
    CHECK_TRUE(std::isnan(out));
  }
}

TEST(running_reductions_write_every_prefix) {
  const int32_t inputs[3][2] = {{1, 10}, {2, 20}, {3, 30}};
  int32_t outputs[3][2] = {};
  const void* in[] = {inputs[0], inputs[1], inputs[2]};
  void* out[] = {outputs[0], outputs[1], outputs[2]};
  FindReduceKernels(DataType::S32, ReduceOp::kSum).running(out, in, 3, 2);
  CHECK_EQ(outputs[0][1], 10);
  CHECK_EQ(outputs[1][0], 3);
  CHECK_EQ(outputs[2][1], 60);
}

TEST(types_that_cannot_be_reduced_have_no_kernel) {
  CHECK_TRUE(FindReduceKernels(DataType::TOKEN, ReduceOp::kSum).reduce == nullptr);
}

}  // namespace
}  // namespace jaxcomm::testing
