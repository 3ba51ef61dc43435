// What the interfaces of NCCL and of the CUDA driver are made of.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_LIBRARY_API_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_LIBRARY_API_H_

namespace jaxcomm {

// A function of a library, which knows its name. It is called, and compared with
// nullptr, as the pointer that was found; null where the library has no such function.
template <typename Pointer>
struct LibraryFunction {
  Pointer found = nullptr;
  const char* name = "";

  operator Pointer() const { return found; }
  void operator=(Pointer pointer) { found = pointer; }
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_LIBRARY_API_H_
