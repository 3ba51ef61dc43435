#ifndef JAXCOMM_FFI_BASE_POINTER_LIST_H_
#define JAXCOMM_FFI_BASE_POINTER_LIST_H_

#include <array>
#include <cstddef>
#include <vector>

namespace jaxcomm {

// `count` pointers; up to kFew of them need no allocation.
template <typename T, size_t kFew>
class PointerList {
 public:
  explicit PointerList(size_t count) {
    if (count > kFew) many_.resize(count);
  }
  PointerList(const PointerList&) = delete;
  PointerList& operator=(const PointerList&) = delete;

  T** data() { return many_.empty() ? few_.data() : many_.data(); }
  T*& operator[](size_t index) { return data()[index]; }

 private:
  std::array<T*, kFew> few_;
  std::vector<T*> many_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BASE_POINTER_LIST_H_
