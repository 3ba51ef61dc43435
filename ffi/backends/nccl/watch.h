// One thread that looks after operations which devices carry out by themselves.
#ifndef JAXCOMM_FFI_BACKENDS_NCCL_WATCH_H_
#define JAXCOMM_FFI_BACKENDS_NCCL_WATCH_H_

#include <memory>

namespace jaxcomm {

class Watched : public std::enable_shared_from_this<Watched> {
 public:
  virtual ~Watched() = default;
  // Looks for what is done, has failed or is late; returns whether anything is left.
  virtual bool Poll() = 0;
  // How long it may take, in seconds. It calls nothing that waits, but the driver makes
  // every caller wait while one waits for a device. The process ends after that.
  virtual double poll_seconds() const = 0;
};

// Polls it until it is gone, or Unwatch().
void Watch(const std::shared_ptr<Watched>& watched);

// Does not poll it any more, nor keep it. Waits for some seconds if it is being polled;
// where that hangs, the watch keeps it.
void Unwatch(const Watched& watched);

// To be called when there is something to look after.
void WakeWatch();

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_NCCL_WATCH_H_
