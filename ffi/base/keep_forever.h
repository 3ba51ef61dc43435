#ifndef JAXCOMM_FFI_BASE_KEEP_FOREVER_H_
#define JAXCOMM_FFI_BASE_KEEP_FOREVER_H_

#include <list>
#include <mutex>
#include <utility>

namespace jaxcomm {

// Keeps a value for as long as the process: something that we cannot end may use it.
template <typename T>
void KeepForever(T value) {
  static std::mutex mutex;
  static auto& kept = *new std::list<T>;
  std::lock_guard<std::mutex> lock(mutex);
  kept.push_back(std::move(value));
}

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BASE_KEEP_FOREVER_H_
