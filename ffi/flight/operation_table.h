// The operations of the call sites of this process. They outlive their programs.
#ifndef JAXCOMM_FFI_FLIGHT_OPERATION_TABLE_H_
#define JAXCOMM_FFI_FLIGHT_OPERATION_TABLE_H_

#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>

#include "ffi/os/mutex.h"

namespace jaxcomm {

struct Operation {
  std::string collective;  // "all_reduce"
  std::string name;        // what the user called: "psum"
  std::string operands;    // "float32[4,8], int32[]"
  std::string dtype;       // of the first operand
  int64_t bytes = 0;       // of all operands on one rank
  uint64_t signature = 0;  // CallSite::signature()
};

// Append-only, one entry per distinct operation: compiling a program again adds none.
class OperationTable {
 public:
  // Never destroyed: threads read it while the process exits.
  static OperationTable& Get();

  uint32_t Intern(const Operation& operation);
  // The reference stays valid.
  const Operation& At(uint32_t index) const;

 private:
  mutable Mutex mutex_;
  // Entry 0 is for call sites without shapes.
  std::deque<Operation> operations_ GUARDED_BY(mutex_){1};
  std::unordered_map<std::string, uint32_t> index_of_ GUARDED_BY(mutex_);
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_FLIGHT_OPERATION_TABLE_H_
