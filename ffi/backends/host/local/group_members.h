// A group of a host communicator, seen from this process: plain data.
#ifndef JAXCOMM_FFI_BACKENDS_HOST_LOCAL_GROUP_MEMBERS_H_
#define JAXCOMM_FFI_BACKENDS_HOST_LOCAL_GROUP_MEMBERS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ffi/base/status.h"
#include "ffi/core/communicator.h"
#include "ffi/core/watchdog.h"

namespace jaxcomm {

// The context that the groups of a communicator share. It outlives them.
struct HostContext {
  const CommunicatorSpec& spec;
  FlightRecorder& recorder;
  Watched& owner;     // the communicator, for who must keep it
  const uint64_t id;  // of the communicator, unique in this process
  // Ends the run in all communicators of this process. Call it without a lock.
  const std::function<void(int64_t run_id, const Status& reason)> end_run;
};

struct GroupMembers {
  std::vector<int64_t> devices;  // by rank
  std::vector<int> here;         // ranks of this process
  std::vector<int> process_of;   // by rank; empty if all are here
  uint64_t processes = 0;        // mask
  uint64_t index = 0;            // of the group, equal on all processes

  int size() const { return static_cast<int>(devices.size()); }
  bool spans_processes() const { return !process_of.empty(); }
};

// "rank 1 of 4 (cpu:1)"
inline std::string RankText(const CommunicatorSpec& spec, const GroupMembers& members,
                            int rank) {
  return StrCat("rank ", rank, " of ", members.size(), " (", spec.platform, ":",
                members.devices[rank], ")");
}

// "rank 3" or "ranks 3, 5"
inline std::string ListText(const std::vector<int>& numbers, const std::string& noun) {
  std::string text = noun + (numbers.size() == 1 ? " " : "s ");
  for (size_t i = 0; i < numbers.size(); ++i) {
    text += StrCat(i == 0 ? "" : ", ", numbers[i]);
  }
  return text;
}

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_BACKENDS_HOST_LOCAL_GROUP_MEMBERS_H_
