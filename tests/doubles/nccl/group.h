// ncclGroupStart and ncclGroupEnd: what the calling thread has collected.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_GROUP_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_GROUP_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "tests/doubles/nccl/communicator.h"
#include "tests/doubles/nccl/operation.h"
#include "tests/doubles/nccl/streams.h"

namespace jaxcomm::fake {

// A call that all ranks of a communicator make and that waits for them.
struct Job {
  std::function<nccl::Result()> run;
  // Set: it runs in the background and leaves its result there.
  std::shared_ptr<Communicator> background;
  // Called where the job failed in the foreground.
  std::function<void()> undo;
};

// Within a group at its end, together with the others; else now.
nccl::Result Submit(Job job);

// Within a group at its end, else now.
nccl::Result Submit(const std::shared_ptr<Communicator>& communicator,
                    const Operation& operation, const std::shared_ptr<Stream>& stream);

// A call that failed within a group makes its end fail. Returns `result`.
nccl::Result Spoil(nccl::Result result);

// The number of the group that the calling thread is in; 0 for none.
uint64_t CurrentGroup();

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_GROUP_H_
