// The communicator of a mesh, and what becomes of splits that fail.
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ffi/backends/nccl/world.h"
#include "tests/ffi/check.h"
#include "tests/ffi/fake_nccl.h"

namespace jaxcomm::testing {
namespace {

TEST(a_split_that_others_do_not_come_to_ends_with_the_world) {
  NcclLibrary library;
  library.nccl = TheFake().nccl;
  library.cuda = TheFake().cuda;
  const nccl::UniqueId id = NewId();
  const std::string text(id.internal, sizeof(id.internal));
  std::shared_ptr<NcclWorld> worlds[2];
  const auto join = [&](int rank) {
    worlds[rank] =
        Must(NcclWorld::Create(library, 2, {{rank, rank, rank}}, text, {}, {10}, {}));
  };
  std::thread other([&] { join(1); });
  join(0);
  other.join();
  {
    // NCCL may still write to its targets: they do not lie on the caller's stack.
    const Status status = worlds[0]->Split({0}, {0}, {}, {0.3}).status();
    CHECK_CONTAINS(std::string(status.message()), "not done after 0.3 s");
  }
  CHECK_TRUE(worlds[0]->is_broken());
  TheFake().clear_trace();
  worlds[0].reset();
  // The world, and what came of the split when that was aborted.
  const std::string trace = TheFake().trace();
  int aborted = 0;
  for (size_t at = 0; (at = trace.find("ncclCommAbort", at)) != std::string::npos;
       ++at) {
    ++aborted;
  }
  CHECK_EQ(aborted, 2);
}

}  // namespace
}  // namespace jaxcomm::testing
