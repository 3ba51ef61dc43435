// Text in shared memory.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_SHARED_TEXT_H_
#define JAXCOMM_FFI_BACKENDS_HOST_SHARED_TEXT_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace jaxcomm {

// Text that one process writes and others read for messages, whole or torn.
template <size_t kBytes>
class SharedText {
 public:
  void Store(std::string_view text) {
    const size_t length = std::min(text.size(), kBytes - 1);
    size_t word = 0;
    for (size_t i = 0; i <= length; i += 8, ++word) {
      uint64_t value = 0;
      std::memcpy(&value, text.data() + i, std::min<size_t>(8, length - i));
      words_[word].store(value, std::memory_order_relaxed);
    }
  }
  std::string Load() const {
    std::string text;
    for (size_t i = 0; i < kBytes; ++i) {
      const uint64_t word = words_[i / 8].load(std::memory_order_relaxed);
      const char c = static_cast<char>(word >> (8 * (i % 8)));
      if (c == 0) break;
      text += c;
    }
    return text;
  }

 private:
  std::atomic<uint64_t> words_[kBytes / 8];
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_SHARED_TEXT_H_
