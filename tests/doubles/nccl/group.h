// Operations on their way to a stream: what the calling thread has collected between
// ncclGroupStart and ncclGroupEnd.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_GROUP_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_GROUP_H_

#include <functional>
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

// A call that all ranks of a communicator make and that waits for them.
struct Job {
  std::function<nccl::Result()> run;
  // Set: it runs in the background and leaves its result there.
  std::shared_ptr<Communicator> background;
  // Called where the job failed in the foreground.
  std::function<void()> undo = [] {};
};

// Within a group at its end, together with the others; else now.
nccl::Result Submit(Job job);

// Within a group at its end, else now.
nccl::Result Submit(const std::shared_ptr<Communicator>& communicator,
                    const Operation& operation, const std::shared_ptr<Stream>& stream);

// The number of the group that the calling thread is in; 0 for none.
uint64_t CurrentGroup();

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_GROUP_H_
