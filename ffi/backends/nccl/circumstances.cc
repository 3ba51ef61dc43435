#include "ffi/backends/nccl/circumstances.h"

#include <sys/statvfs.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "ffi/backends/nccl/health.h"

extern char** environ;

namespace jaxcomm {

Status WithCircumstances(const NcclLibrary& library, const Status& status,
                         cuda::Context context) {
  std::string variables;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    if (std::strncmp(*entry, "NCCL_", 5) == 0) variables += StrCat(" ", *entry);
  }
  std::string text =
      StrCat(status.message(), ". NCCL ", library.VersionText(), " from ", library.path,
             "; variables set:", variables.empty() ? " none" : variables,
             "; live communicators: ", Health::num_watched());
  struct sysinfo host;
  if (sysinfo(&host) == 0) {
    const uint64_t unit = host.mem_unit;
    text += StrCat("; free MiB: host ", (host.freeram * unit) >> 20);
  }
  if (context != nullptr) {
    CurrentContext current(library.cuda, context);
    size_t free = 0, total = 0;
    if (library.cuda.MemGetInfo(&free, &total) == cuda::kSuccess) {
      text += StrCat(", device ", free >> 20, " of ", total >> 20);
    }
  }
  struct statvfs shared;
  if (statvfs("/dev/shm", &shared) == 0) {
    const uint64_t unit = shared.f_frsize;
    text += StrCat(", /dev/shm ", (shared.f_bavail * unit) >> 20);
  }
  return Status(ErrorCode::kInternal, text);
}

}  // namespace jaxcomm
