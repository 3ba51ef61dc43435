#include "ffi/backends/nccl/library/library.h"

#include <dlfcn.h>

#include <memory>

#include "ffi/os/mutex.h"

namespace jaxcomm {
namespace {

std::string LoaderError() {
  const char* text = dlerror();
  return text == nullptr ? "no reason given" : text;
}

std::string PathOf(void* function) {
  Dl_info info;
  return dladdr(function, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname
                                                                   : "unknown";
}

// A library that stays open.
struct Source {
  void* handle;

  template <typename Pointer>
  bool Find(const char* exported, LibraryFunction<Pointer>* function) const {
    function->found = reinterpret_cast<Pointer>(dlsym(handle, exported));
    return function->found != nullptr;
  }
};

Status LoadCuda(NcclLibrary* library) {
  void* const handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return FailedPrecondition("the CUDA driver cannot be loaded: ", LoaderError());
  }
  const Source source{handle};
  std::string lacks;
#define JAXCOMM_FIND(exported, name, parameters) \
  if (!source.Find(#exported, &library->cuda.name)) lacks += " " #exported;
  JAXCOMM_CUDA_FUNCTIONS(JAXCOMM_FIND)
#undef JAXCOMM_FIND
  if (!lacks.empty()) return FailedPrecondition("the CUDA driver lacks", lacks);
  RETURN_IF_ERROR(library->Try(library->cuda.Init, 0));
  library->cuda.DriverGetVersion(&library->driver_version);
  return OkStatus();
}

Status Load(const std::vector<std::string>& paths, NcclLibrary* library) {
  // XLA's plugin may have it open already, unless a file was named.
  void* handle = paths.size() == 1 && paths[0].find('/') != std::string::npos
                     ? nullptr
                     : dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  std::string tried;
  for (size_t i = 0; handle == nullptr && i < paths.size(); ++i) {
    handle = dlopen(paths[i].c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) tried += StrCat(i > 0 ? "; " : "", LoaderError());
  }
  if (handle == nullptr) {
    return FailedPrecondition("NCCL cannot be loaded: ", tried,
                              ". Install jaxcomm[cuda12] or jaxcomm[cuda13], or name "
                              "the library by JAXCOMM_NCCL_LIBRARY");
  }
  const Source source{handle};
  std::string lacks;
#define JAXCOMM_FIND(name, result, parameters) \
  if (!source.Find("nccl" #name, &library->nccl.name)) lacks += " nccl" #name;
  JAXCOMM_NCCL_REQUIRED(JAXCOMM_FIND)
#undef JAXCOMM_FIND
  if (!lacks.empty()) {
    return FailedPrecondition("the NCCL library lacks", lacks,
                              "; version 2.18 or newer is needed");
  }
#define JAXCOMM_FIND(name, result, parameters)           \
  if (!source.Find("nccl" #name, &library->nccl.name)) { \
    library->missing.push_back("nccl" #name);            \
  }
  JAXCOMM_NCCL_OPTIONAL(JAXCOMM_FIND)
#undef JAXCOMM_FIND
  library->path = PathOf(reinterpret_cast<void*>(library->nccl.GetVersion.found));
  RETURN_IF_ERROR(library->Try(library->nccl.GetVersion, &library->version));
  return LoadCuda(library);
}

Mutex mutex;
// Never destroyed: the watchdog may use it while the process exits.
const NcclLibrary* loaded GUARDED_BY(mutex) = nullptr;

}  // namespace

std::string NcclLibrary::VersionText() const {
  return StrCat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

Status NcclLibrary::Check(nccl::Result result, const char* what) const {
  if (result == nccl::kSuccess || result == nccl::kInProgress) return OkStatus();
  // NCCL looks at no communicator, and another thread may have aborted it.
  const char* last = nccl.GetLastError(nullptr);
  const bool has_last = last != nullptr && last[0] != '\0';
  return Status(
      result == nccl::kRemoteError ? ErrorCode::kUnavailable : ErrorCode::kInternal,
      StrCat(what, ": ", nccl.GetErrorString(result), has_last ? " (" : "",
             has_last ? last : "", has_last ? ")" : ""));
}

Status NcclLibrary::Check(cuda::Result result, const char* what) const {
  if (result == cuda::kSuccess) return OkStatus();
  const char* text = nullptr;
  cuda.GetErrorString(result, &text);
  return Status(result == cuda::kOutOfMemory ? ErrorCode::kResourceExhausted
                                             : ErrorCode::kInternal,
                StrCat(what, ": ", text == nullptr ? "CUDA error " : text,
                       text == nullptr ? std::to_string(result) : ""));
}

Status NcclLibrary::InGroup(const char* what,
                            const std::vector<cuda::Context>& contexts,
                            const std::function<Status(size_t)>& call) const {
  const CurrentContext first(cuda, contexts[0]);
  RETURN_IF_ERROR(Try(nccl.GroupStart));
  Status status = OkStatus();
  for (size_t i = 0; i < contexts.size() && status.success(); ++i) {
    const CurrentContext current(cuda, contexts[i]);
    status = call(i);
  }
  Status ended = Check(nccl.GroupEnd(), what);
  return status.failure() ? status : ended;
}

ErrorOr<const NcclLibrary*> LoadNccl(const std::vector<std::string>& paths) {
  MutexLock lock(mutex);
  if (loaded == nullptr) {
    auto found = std::make_unique<NcclLibrary>();
    RETURN_IF_ERROR(Load(paths, found.get()));
    loaded = found.release();
  }
  return loaded;
}

const NcclLibrary* LoadedNccl() {
  MutexLock lock(mutex);
  return loaded;
}

CurrentContext::CurrentContext(const cuda::Api& cuda, cuda::Context context)
    : cuda_(cuda), is_pushed_(cuda.CtxPushCurrent(context) == cuda::kSuccess) {}

CurrentContext::~CurrentContext() {
  cuda::Context popped = nullptr;
  if (is_pushed_) cuda_.CtxPopCurrent(&popped);
}

}  // namespace jaxcomm
