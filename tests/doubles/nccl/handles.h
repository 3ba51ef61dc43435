// Handles that callers hold: numbers dressed as pointers, never used twice, so that a
// destroyed one is recognised and not followed.
#ifndef JAXCOMM_TESTS_DOUBLES_NCCL_HANDLES_H_
#define JAXCOMM_TESTS_DOUBLES_NCCL_HANDLES_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace jaxcomm::fake {

inline int64_t Number(const void* handle) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(handle));
}

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
    return found == objects_.end() ? nullptr : found->second;
  }

  // The object, whose handle is invalid from now on.
  std::shared_ptr<Object> Remove(Handle handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = objects_.find(handle);
    if (found == objects_.end()) return nullptr;
    std::shared_ptr<Object> object = std::move(found->second);
    objects_.erase(found);
    return object;
  }

 private:
  std::mutex mutex_;
  uintptr_t next_;
  std::map<Handle, std::shared_ptr<Object>> objects_;
};

}  // namespace jaxcomm::fake

#endif  // JAXCOMM_TESTS_DOUBLES_NCCL_HANDLES_H_
