// The functions that a stand-in for NCCL, which serves CPU devices in tests, has beyond
// NCCL's. Production code knows nothing else of it. No real library exports them.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_TEST_DOUBLE_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_TEST_DOUBLE_H_

#include <cstddef>
#include <cstdint>

namespace jaxcomm {

struct TestDouble {
  // Whether the versions that it pretends to be have a function: "ncclCommSuspend".
  int (*has)(const char* function);

  // Calls issue(argument) on a thread of the member, when all calls that the first
  // member of the world has come to before this one were issued, or soon after
  // is_refused(argument). XLA:GPU runs a program's calls in one order on every device;
  // XLA:CPU does not.
  void (*arrive)(const void* world, size_t member, int64_t run, uint64_t call_site,
                 bool (*is_refused)(void*), void (*issue)(void*), void* argument);
  void (*forget)(const void* world);

  // Calls done(argument, error) once the stream has come so far. `error`: of CUDA; 0
  // also where what ran was aborted, as XLA:GPU sees it.
  void (*when_done)(void* stream, void (*done)(void*, int), void* argument);
};

// The stand-in exports a function of this type and name.
using FindTestDouble = const TestDouble* (*)();
inline constexpr const char* kFindTestDouble = "jaxcommTestDouble";

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_TEST_DOUBLE_H_
