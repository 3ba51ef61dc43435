// Failures that a test asks for.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_FAULTS_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_FAULTS_H_

#include <string>

namespace jaxcomm::fake {

struct Fault {
  int result = 0;     // what the call returns instead of doing anything
  bool hang = false;  // what it starts never completes
};

// The fault that is due for this call of `function`; counts the call. Does not return
// where the fault is death.
Fault TakeFault(const std::string& function);

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_FAULTS_H_
