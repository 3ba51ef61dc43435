// Ends the process when nothing else can be trusted to end.
#ifndef JAXCOMM_FFI_CORE_LAST_RESORT_H_
#define JAXCOMM_FFI_CORE_LAST_RESORT_H_

#include <cstdint>
#include <string>

namespace jaxcomm {

// The exit status of a process that EndProcess() ends.
inline constexpr int kEndedStatus = 70;

// Writes `text` to stderr and the flight records to their folder, for a second at most.
// Then ends the process at once, without destructors: they may wait for a device that
// never answers.
[[noreturn]] void EndProcess(const std::string& text);

// Guards a step that must not hang: unless this is destroyed within `seconds`, the
// process ends with `text`. One thread of the process looks after all of them; it calls
// nothing that can block.
class LastResort {
 public:
  LastResort(double seconds, std::string text);
  ~LastResort();
  LastResort(const LastResort&) = delete;
  LastResort& operator=(const LastResort&) = delete;

  // Starts the thread, so that a process that cannot have one fails here, and not when
  // it needs it.
  static bool Prepare();

 private:
  uint64_t number_ = 0;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_CORE_LAST_RESORT_H_
