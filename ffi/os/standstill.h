// Whether this process stands still: whether all its threads wait for each other.
//
// A thread that sleeps in a futex of this process, without a timeout, goes on when
// another thread of the process wakes it, and else never. If that is true of all
// threads at one time, none of them ever goes on. Two looks prove it: each finds the
// thread asleep, and it was not woken in between.
//
// Some threads wait in other ways for as long as the process lives, and are left out:
// ours that wait for other processes, and those of libraries for connections, timers
// and alarms. These run no program. To tell them from a thread in which a program
// sleeps or reads, the class learns: whoever was seen to wait for another thread
// belongs to the program, and so does the main thread.
#ifndef JAXCOMM_FFI_OS_STANDSTILL_H_
#define JAXCOMM_FFI_OS_STANDSTILL_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>

namespace jaxcomm {

// Not thread-safe.
class Standstill {
 public:
  // Whoever waits for something else than another thread now, and never was seen to do
  // that, counts as a library's. Call this where programs are likely to run or to wait
  // for each other, and not to sleep: before the first, and at its first collective.
  void Learn();

  // Whether the threads stood still from the last call until now. False at the first
  // call, and if Linux does not show what threads wait for.
  bool Look();

 private:
  using Thread = std::pair<int64_t, uint64_t>;  // id, time of its start
  // How often each thread of the program ran, or where it waits, if all of them wait
  // for each other.
  using Waits = std::map<Thread, std::string>;

  struct Seen;
  template <typename Visit>
  static bool ForThreads(const Visit& visit);
  bool IsLeftOut(const Seen& seen);
  // Whether all threads of programs wait. If not, whether the main thread is the one
  // that runs.
  bool AllWait(Waits* found, bool* main_runs);

  std::set<Thread> of_programs_;
  std::set<Thread> of_libraries_;
  // The descriptors on which those waited for events: they take turns with others.
  std::set<int64_t> polled_;
  Waits last_;
};

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_OS_STANDSTILL_H_
