// NCCL and the CUDA driver, found when they are first needed and never linked: one
// build serves machines with and without a GPU, and every version of both.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_LIBRARY_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_LIBRARY_H_

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "ffi/backends/nccl/library/cuda_api.h"
#include "ffi/backends/nccl/library/nccl_api.h"
#include "ffi/base/status.h"

namespace jaxcomm {

// Of Watched: why a poll can take long. It calls nothing that waits, but the driver
// makes every caller wait while one waits for a device.
inline constexpr char kDriverStuck[] =
    "the thread that watches over collectives does not get an answer of the CUDA "
    "driver, and cannot end what hangs";

struct NcclLibrary {
  nccl::Api nccl;
  cuda::Api cuda;
  std::string path;                  // of the file NCCL was loaded from
  int version = 0;                   // 22707 is 2.27.7
  int driver_version = 0;            // 13000 is CUDA 13.0
  std::vector<std::string> missing;  // optional functions that it lacks

  // "2.27.7"
  std::string VersionText() const;
  // OkStatus(), or an error that says what was called and what went wrong.
  Status Check(nccl::Result result, const char* what) const;
  Status Check(cuda::Result result, const char* what) const;
  // Calls a function of either library.
  template <typename Pointer, typename... Arguments>
  Status Try(const LibraryFunction<Pointer>& function, Arguments... arguments) const {
    return Check(function(arguments...), function.name);
  }
  // Makes call(0), call(1) and so on, up to the first error, as one group of NCCL's,
  // each with the context of its device current. Requires at least one.
  Status InGroup(const char* what, const std::vector<cuda::Context>& contexts,
                 const std::function<Status(size_t)>& call) const;
};

// Loads NCCL from the first of `paths` that can be, or takes the copy that this process
// has already: two copies of NCCL corrupt each other. Once loaded it stays.
ErrorOr<const NcclLibrary*> LoadNccl(const std::vector<std::string>& paths);

// Returns the library that LoadNccl loaded; null before.
const NcclLibrary* LoadedNccl();

// Makes a device's context current, and the caller's again at the end. Around every
// call of NCCL, a group and its end, too: by way of CUDA's runtime NCCL looks which
// device a thread has, and sets that again at the end. A thread without any gets device
// 0, and the process a context there (545 MiB of an H200), whichever device it has. And
// a group that fails may leave the device of another rank: so it is pushed even if it
// is the current one, and what NCCL put in its place is popped.
class CurrentContext {
 public:
  CurrentContext(const cuda::Api& cuda, cuda::Context context);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const cuda::Api& cuda_;
  const bool is_pushed_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_LIBRARY_H_
