#include "ffi/backends/host/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>

namespace jaxcomm {
namespace {

Status SystemError(const std::string& what, int error) {
  return Status(ErrorCode::kUnavailable, StrCat(what, ": ", std::strerror(error)));
}

Status Map(int fd, int64_t bytes, char** data) {
  void* const mapped = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                            MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) {
    return SystemError(StrCat("cannot map ", bytes, " bytes of shared memory"), errno);
  }
  *data = static_cast<char*>(mapped);
  return OkStatus();
}

}  // namespace

Status Segment::Create(int64_t bytes, bool named, std::shared_ptr<Segment>* out) {
  std::random_device random;
  const uint64_t nonce = (static_cast<uint64_t>(random()) << 32) | random() | 1;
  std::shared_ptr<Segment> segment(new Segment);
  SegmentAddress& address = segment->address_;
  address.bytes = bytes;
  address.nonce = nonce;
  if (named) {
    const std::string name = StrCat("/jaxcomm-", getpid(), "-", nonce);
    address.path = StrCat("/dev/shm", name);
    segment->fd_ = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (segment->fd_ < 0) {
      return SystemError(StrCat("cannot create ", address.path), errno);
    }
    segment->named_ = true;
    // Touching a page that /dev/shm has no room for would end the process: ask for
    // all of them now.
    if (const int error = posix_fallocate(segment->fd_, 0, bytes); error != 0) {
      return SystemError(StrCat("/dev/shm has no room for ", bytes,
                                " bytes (enlarge it, or run the processes under one "
                                "user so that they need none)"),
                         error);
    }
  } else {
    segment->fd_ = memfd_create("jaxcomm", MFD_CLOEXEC);
    if (segment->fd_ < 0) return SystemError("memfd_create failed", errno);
    address.path = StrCat("/proc/", getpid(), "/fd/", segment->fd_);
    if (ftruncate(segment->fd_, bytes) != 0) {
      return SystemError(StrCat("cannot make a memfd of ", bytes, " bytes"), errno);
    }
  }
  if (Status status = Map(segment->fd_, bytes, &segment->data_); status.failure()) {
    return status;
  }
  std::memcpy(segment->data_, &nonce, sizeof(nonce));
  *out = std::move(segment);
  return OkStatus();
}

Status Segment::Attach(const SegmentAddress& address, std::shared_ptr<Segment>* out) {
  std::shared_ptr<Segment> segment(new Segment);
  segment->address_ = address;
  segment->fd_ = open(address.path.c_str(), O_RDWR | O_CLOEXEC);
  if (segment->fd_ < 0) return SystemError(StrCat("cannot open ", address.path), errno);
  struct stat info;
  if (fstat(segment->fd_, &info) != 0 || info.st_size != address.bytes) {
    return FailedPrecondition(address.path, " is not the segment that was announced");
  }
  if (Status status = Map(segment->fd_, address.bytes, &segment->data_);
      status.failure()) {
    return status;
  }
  uint64_t nonce = 0;
  std::memcpy(&nonce, segment->data_, sizeof(nonce));
  if (nonce != address.nonce) {
    return FailedPrecondition(address.path, " is not the segment that was announced");
  }
  *out = std::move(segment);
  return OkStatus();
}

Segment::~Segment() {
  Forget();
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(address_.bytes));
  if (fd_ >= 0) close(fd_);
}

int64_t Segment::resident_bytes() const {
  struct stat info;
  return fstat(fd_, &info) == 0 ? static_cast<int64_t>(info.st_blocks) * 512 : 0;
}

void Segment::Forget() {
  if (!named_) return;
  named_ = false;
  (void)shm_unlink(address_.path.c_str() + std::strlen("/dev/shm"));
}

}  // namespace jaxcomm
