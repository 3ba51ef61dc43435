// The runs of programs that came to a group, numbered from the making of the
// communicator. Between processes XLA's run ids do not serve: they depend on where the
// source file lies, and stay apart for good once one process ran alone.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_RUN_NUMBERS_H_
#define JAXCOMM_FFI_BACKENDS_HOST_RUN_NUMBERS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <utility>

namespace jaxcomm {

// Not thread-safe: the owner has a lock.
class RunNumbers {
 public:
  // How many runs of the program came before this one, and itself.
  uint64_t NumberOf(uint64_t program, int64_t run_id) {
    Runs& runs = runs_[program];
    for (auto it = runs.recent.rbegin(); it != runs.recent.rend(); ++it) {
      if (it->first == run_id) return it->second;
    }
    runs.recent.emplace_back(run_id, ++runs.count);
    if (runs.recent.size() > kRecentRuns) runs.recent.pop_front();
    return runs.count;
  }

 private:
  // Runs of one program that may be under way at a time.
  static constexpr size_t kRecentRuns = 64;

  struct Runs {
    uint64_t count = 0;
    std::deque<std::pair<int64_t, uint64_t>> recent;  // run id, number
  };

  std::unordered_map<uint64_t, Runs> runs_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_RUN_NUMBERS_H_
