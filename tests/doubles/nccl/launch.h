// Operations on their way to a stream.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_LAUNCH_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_LAUNCH_H_

#include <memory>
#include <vector>

#include "tests/doubles/nccl/communicator.h"
#include "tests/doubles/nccl/operation.h"
#include "tests/doubles/nccl/streams.h"

namespace jaxcomm::fake {

// All of one group on one communicator: they progress together.
struct Launch {
  std::shared_ptr<Communicator> communicator;
  std::vector<Operation> operations;
  // The first runs it; the others wait for it, and it for them.
  std::vector<std::shared_ptr<Stream>> streams;
};

// Enqueues and returns.
void Enqueue(Launch launch);

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_LAUNCH_H_
