#ifndef JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_SETTINGS_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_SETTINGS_H_

#include <map>
#include <string>

#include "ffi/backends/nccl/library/library.h"

namespace jaxcomm {

// The fields of ncclConfig_t that a policy sets, by NCCL's names; what is not there is
// NCCL's default.
struct NcclSettings {
  std::map<std::string, int> numbers;
  std::string name;

  // As the library's version lays it out. Points into this.
  nccl::Config ConfigFor(const NcclLibrary& library) const;
  // A field that this version does not know; empty if there is none.
  std::string Unknown(const NcclLibrary& library) const;
  // Whether NCCL shares resources between communicators that it splits off so.
  bool shares() const;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_LIBRARY_SETTINGS_H_
