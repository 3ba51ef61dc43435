// Hashes that processes compare. std::hash differs between libraries; these do not.
#ifndef JAXCOMM_FFI_CORE_HASH_H_
#define JAXCOMM_FFI_CORE_HASH_H_

#include <cstdint>
#include <string_view>

namespace jaxcomm {

// FNV-1a of 64 bits (Fowler, Noll and Vo; RFC 9923).
constexpr uint64_t Fnv1a(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char byte : text) {
    hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
  }
  return hash;
}

// Adds a value to a hash.
constexpr uint64_t Mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0xff51afd7ed558ccd;
  return hash ^ (hash >> 32);
}

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_CORE_HASH_H_
