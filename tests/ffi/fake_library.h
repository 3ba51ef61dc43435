// The stand-in as the backend holds it, for tests of the backend's own classes.
#ifndef JAXCOMM_TESTS_FFI_FAKE_LIBRARY_H_
#define JAXCOMM_TESTS_FFI_FAKE_LIBRARY_H_

#include <string>

#include "ffi/backends/nccl/library.h"
#include "tests/ffi/fake_nccl.h"

namespace jaxcomm::testing {

inline NcclLibrary MakeLibrary() {
  NcclLibrary made;
  made.nccl = TheFake().nccl;
  made.cuda = TheFake().cuda;
  made.version = 23200;
  made.test_double = TheFake().test_double();
  return made;
}

inline const NcclLibrary& Library() {
  static const NcclLibrary library = MakeLibrary();
  return library;
}

// The calls of a function in the trace.
inline int Count(const std::string& name) {
  const std::string trace = TheFake().trace(), wanted = "\"" + name + "\"";
  int count = 0;
  for (size_t at = 0; (at = trace.find(wanted, at)) != std::string::npos; ++at) ++count;
  return count;
}

}  // namespace jaxcomm::testing

#endif  // JAXCOMM_TESTS_FFI_FAKE_LIBRARY_H_
