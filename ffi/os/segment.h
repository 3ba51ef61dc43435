// A piece of memory that processes of one host share.
#ifndef JAXCOMM_FFI_OS_SEGMENT_H_
#define JAXCOMM_FFI_OS_SEGMENT_H_

#include <cstdint>
#include <memory>
#include <string>

#include "ffi/base/status.h"

namespace jaxcomm {

// How other processes find a segment. It travels by any way between them.
struct SegmentAddress {
  std::string path;  // "/proc/<pid>/fd/<fd>" or "/dev/shm/<name>"
  int64_t bytes = 0;
  uint64_t nonce = 0;  // stands at its beginning: a path may lead elsewhere
};

class Segment : public std::enable_shared_from_this<Segment> {
 public:
  // Makes zeroed memory. Anonymous memory (memfd) has no name and no size limit of
  // /dev/shm's, and is gone with the last process that maps it; `named` makes a file
  // in /dev/shm instead, where others may not look into our /proc folder.
  static ErrorOr<std::shared_ptr<Segment>> Create(int64_t bytes, bool named);
  // Attaches to a segment that another process of this user made; refuses all else.
  static ErrorOr<std::shared_ptr<Segment>> Attach(const SegmentAddress& address);
  ~Segment();

  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const SegmentAddress& address() const { return address_; }
  char* data() const { return data_; }

  // Memory the system holds for it: pages that were touched.
  int64_t resident_bytes() const;

  // Once all have attached: nobody can find it by name any more, and closing is
  // enough to free it.
  void Forget();

 private:
  Segment() = default;

  SegmentAddress address_;
  int fd_ = -1;
  char* data_ = nullptr;
  bool named_ = false;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_OS_SEGMENT_H_
