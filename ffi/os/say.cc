#include "ffi/os/say.h"

#include <poll.h>
#include <unistd.h>

#include <memory>
#include <utility>

#include "ffi/os/start_thread.h"

namespace jaxcomm {

std::shared_future<void> Say(std::string line) {
  const auto said = std::make_shared<std::promise<void>>();
  std::shared_future<void> answer = said->get_future().share();
  const auto write_line = [said, line = std::move(line)] {
    [[maybe_unused]] const ssize_t written =
        write(STDERR_FILENO, line.data(), line.size());
    said->set_value();
  };
  if (StartDetached(write_line, "jaxcomm-say").success()) return answer;
  // Without a thread: only where it does not block.
  pollfd has_room{STDERR_FILENO, POLLOUT, 0};
  if (poll(&has_room, 1, 0) == 1) {
    write_line();
  } else {
    said->set_value();
  }
  return answer;
}

}  // namespace jaxcomm
