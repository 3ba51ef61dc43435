// The files in which Linux describes itself.
#ifndef JAXCOMM_FFI_OS_SYSTEM_FILE_H_
#define JAXCOMM_FFI_OS_SYSTEM_FILE_H_

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <string>

namespace jaxcomm {

// Returns the beginning of a file of /proc or /sys, by one read(2), or "" if it cannot
// be read.
inline std::string ReadSystemFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return "";
  char text[4096];
  ssize_t length;
  do {
    length = read(fd, text, sizeof(text));
  } while (length < 0 && errno == EINTR);
  close(fd);
  return length <= 0 ? "" : std::string(text, static_cast<size_t>(length));
}

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_OS_SYSTEM_FILE_H_
