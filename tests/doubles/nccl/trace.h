// What was called, in order; read through jaxcommFakeTrace().
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_TRACE_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_TRACE_H_

#include <cstdint>
#include <string>

namespace jaxcomm::fake {

// A field that does not apply keeps its value here, and is left out of the text.
struct TraceEntry {
  const char* name = "";
  int64_t comm = 0;
  int64_t stream = -1;
  int64_t count = -1;
  int type = -1;
  int op = -1;
  int peer = -1;  // or root
  uint64_t group = 0;
  std::string detail = {};     // further JSON members
  std::string violation = {};  // the rule that the call broke
};

void Trace(const TraceEntry& entry);

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_TRACE_H_
