#include "ffi/os/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <string_view>

#include "ffi/os/forked.h"

namespace jaxcomm {
namespace {

Status SystemError(const std::string& what, int error) {
  return Status(ErrorCode::kUnavailable, StrCat(what, ": ", std::strerror(error)));
}

ErrorOr<char*> Map(int fd, int64_t bytes) {
  void* const mapped = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                            MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) {
    return SystemError(StrCat("cannot map ", bytes, " bytes of shared memory"), errno);
  }
  return static_cast<char*>(mapped);
}

bool IsNumber(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == text.npos;
}

constexpr std::string_view kNamed = "/dev/shm/jaxcomm-";

// "/dev/shm/jaxcomm-<name>"
bool IsNamed(std::string_view path) {
  return path.size() > kNamed.size() && path.substr(0, kNamed.size()) == kNamed &&
         path.find('/', kNamed.size()) == path.npos;
}

// "/proc/<pid>/fd/<fd>"
bool IsAnonymous(std::string_view path) {
  constexpr std::string_view kProc = "/proc/", kFd = "/fd/";
  if (path.substr(0, kProc.size()) != kProc) return false;
  path.remove_prefix(kProc.size());
  const size_t fd = path.find(kFd);
  return fd != path.npos && IsNumber(path.substr(0, fd)) &&
         IsNumber(path.substr(fd + kFd.size()));
}

// The size must not change: touching memory beyond the end of its file kills a process.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

}  // namespace

ErrorOr<std::shared_ptr<Segment>> Segment::Create(int64_t bytes, bool named) {
  std::random_device random;
  const uint64_t nonce = (static_cast<uint64_t>(random()) << 32) | random() | 1;
  CountForksFromNow();
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
    segment->fd_ = memfd_create("jaxcomm", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (segment->fd_ < 0) return SystemError("memfd_create failed", errno);
    address.path = StrCat("/proc/", getpid(), "/fd/", segment->fd_);
    if (ftruncate(segment->fd_, bytes) != 0) {
      return SystemError(StrCat("cannot make a memfd of ", bytes, " bytes"), errno);
    }
    if (fcntl(segment->fd_, F_ADD_SEALS, kSeals | F_SEAL_SEAL) != 0) {
      return SystemError("cannot fix the size of a memfd", errno);
    }
  }
  ASSIGN_OR_RETURN(segment->data_, Map(segment->fd_, bytes));
  std::memcpy(segment->data_, &nonce, sizeof(nonce));
  return segment;
}

ErrorOr<std::shared_ptr<Segment>> Segment::Attach(const SegmentAddress& address) {
  // The address comes from the key-value store. Its path may lead anywhere: to another
  // process's file, where process ids mean something else, or to a device.
  const bool is_anonymous = IsAnonymous(address.path);
  if (!is_anonymous && !IsNamed(address.path)) {
    return FailedPrecondition("'", address.path, "' is no path of shared memory");
  }
  std::shared_ptr<Segment> segment(new Segment);
  segment->address_ = address;
  const int flags = O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
  // The files in /proc are links.
  segment->fd_ = open(address.path.c_str(), is_anonymous ? flags : flags | O_NOFOLLOW);
  if (segment->fd_ < 0) return SystemError(StrCat("cannot open ", address.path), errno);
  struct stat info;
  if (fstat(segment->fd_, &info) != 0 || !S_ISREG(info.st_mode) ||
      info.st_size != address.bytes) {
    return FailedPrecondition(address.path, " is not the segment that was announced");
  }
  if (info.st_uid != geteuid()) {
    return FailedPrecondition(address.path, " belongs to user ", info.st_uid,
                              ", not to user ", geteuid(), " of this process");
  }
  if (is_anonymous && (fcntl(segment->fd_, F_GET_SEALS) & kSeals) != kSeals) {
    return FailedPrecondition(address.path, " is memory whose size may change");
  }
  ASSIGN_OR_RETURN(segment->data_, Map(segment->fd_, address.bytes));
  uint64_t nonce = 0;
  std::memcpy(&nonce, segment->data_, sizeof(nonce));
  if (nonce != address.nonce) {
    return FailedPrecondition(address.path, " is not the segment that was announced");
  }
  return segment;
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
  if (!named_ || IsForked()) return;
  named_ = false;
  (void)shm_unlink(address_.path.c_str() + std::strlen("/dev/shm"));
}

}  // namespace jaxcomm
