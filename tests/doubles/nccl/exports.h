// What the library exports, declared from the tables that the real backend loads by:
// a definition with other parameters does not compile. And what all files share, with
// the headers of the standard library that this takes.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_EXPORTS_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_EXPORTS_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "ffi/backends/nccl/library/cuda_api.h"
#include "ffi/backends/nccl/library/nccl_api.h"
#include "tests/doubles/nccl/controls.h"

namespace jaxcomm::fake {

// What is open: "streams", and how many.
using CountOpen = size_t (*)();
struct OpenKind {
  OpenKind(const char* name, CountOpen count);
};

inline int64_t Number(const void* handle) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(handle));
}

// How soon those that wait see what nobody tells them. No outcome depends on it.
inline constexpr std::chrono::milliseconds kLook(1);

// Holds the lock of the only T there is. That is never destroyed: streams' threads
// outlive main().
template <typename T>
class Locked {
 public:
  Locked() : lock_(Only().mutex) {}
  T* operator->() const { return &Only().value; }

 private:
  struct Guarded {
    std::mutex mutex;
    T value;
  };
  static Guarded& Only() {
    static Guarded& only = *new Guarded;
    return only;
  }
  const std::lock_guard<std::mutex> lock_;
};

// Notes that the caller of the function that this thread is in broke a rule of its
// interface, which the real libraries need not notice.
void Misuse(const std::string& how);

// Handles that callers hold: numbers dressed as pointers, never used twice, so that a
// destroyed one is recognised and not followed.
template <typename Handle, typename Object>
class Handles {
 public:
  // Numbers start at `first`.
  explicit Handles(uintptr_t first) : next_(first) {}

  Handle Add(std::shared_ptr<Object> object) {
    std::lock_guard<std::mutex> lock(mutex_);
    const Handle handle = reinterpret_cast<Handle>(next_++);
    objects_.emplace(handle, std::move(object));
    return handle;
  }

  // Null if there is none, or none any more.
  std::shared_ptr<Object> Find(Handle handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = objects_.find(handle);
    if (found != objects_.end()) return found->second;
    if (handle != nullptr) Misuse("a handle that is none, or none any more");
    return nullptr;
  }

  // The object, whose handle is invalid from now on.
  std::shared_ptr<Object> Remove(Handle handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = objects_.find(handle);
    if (found == objects_.end()) {
      if (handle != nullptr) Misuse("a handle that is none, or none any more");
      return nullptr;
    }
    std::shared_ptr<Object> object = std::move(found->second);
    objects_.erase(found);
    return object;
  }

  size_t size() {
    std::lock_guard<std::mutex> lock(mutex_);
    return objects_.size();
  }

 private:
  std::mutex mutex_;
  uintptr_t next_;
  std::map<Handle, std::shared_ptr<Object>> objects_;
};

}  // namespace jaxcomm::fake

namespace jaxcomm::nccl {
extern "C" {
#define JAXCOMM_FAKE_DECLARE(name, result, parameters) \
  JAXCOMM_FAKE_EXPORT result nccl##name parameters;
JAXCOMM_NCCL_REQUIRED(JAXCOMM_FAKE_DECLARE)
#undef JAXCOMM_FAKE_DECLARE
// Exported by versions.cc, to those who pretend to have a version that has them.
#define JAXCOMM_FAKE_DECLARE(name, result, parameters) \
  result nccl##name parameters asm("jaxcommFake_nccl" #name);
JAXCOMM_NCCL_OPTIONAL(JAXCOMM_FAKE_DECLARE)
#undef JAXCOMM_FAKE_DECLARE
}

}  // namespace jaxcomm::nccl

namespace jaxcomm::cuda {
extern "C" {
#define JAXCOMM_FAKE_DECLARE(exported, name, parameters) \
  JAXCOMM_FAKE_EXPORT Result exported parameters;
JAXCOMM_CUDA_FUNCTIONS(JAXCOMM_FAKE_DECLARE)
#undef JAXCOMM_FAKE_DECLARE
// Only tests ask it.
JAXCOMM_FAKE_EXPORT Result cuCtxGetCurrent(Context*);
}

// Results that only the stand-in names.
inline constexpr Result kNotInitialized = static_cast<Result>(3);
inline constexpr Result kInvalidDevice = static_cast<Result>(101);
inline constexpr Result kInvalidContext = static_cast<Result>(201);
inline constexpr Result kInvalidPtx = static_cast<Result>(218);
inline constexpr Result kInvalidHandle = static_cast<Result>(400);
inline constexpr Result kNotFound = static_cast<Result>(500);
inline constexpr Result kNotPermitted = static_cast<Result>(800);
inline constexpr Result kCaptureUnsupported = static_cast<Result>(900);
inline constexpr Result kCapturedEvent = static_cast<Result>(907);

}  // namespace jaxcomm::cuda

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_EXPORTS_H_
