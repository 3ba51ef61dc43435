// A flight record as text: JSON for files and Python, lines for a terminal.
#ifndef JAXCOMM_FFI_FLIGHT_FLIGHT_RECORD_FORMAT_H_
#define JAXCOMM_FFI_FLIGHT_FLIGHT_RECORD_FORMAT_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/flight/flight_recorder.h"

namespace jaxcomm {

struct CommunicatorSpec;

// Which of the processes of a job this is.
struct ProcessDescription {
  int process = 0;
  int processes = 1;
  // Global ids of its devices, by platform: they tell whose a silent rank is.
  std::vector<std::pair<std::string, std::vector<int64_t>>> devices;
};

// What a record says of a communicator; it keeps nothing of its spec alive.
struct FlownCommunicator {
  explicit FlownCommunicator(const CommunicatorSpec& spec);

  int64_t key;
  std::string axes, lane, backend, platform;
  double timeout_seconds;
  std::vector<std::vector<int64_t>> groups;
};

struct CommunicatorFlight {
  FlownCommunicator of;
  std::vector<FlightRecorder::Entry> entries;
};

// Seconds since 1970.
double UnixSeconds();

// The format is documented in jaxcomm/diagnostics/flight_record.py, which reads it.
std::string FlightRecordJson(const ProcessDescription& process, std::string_view reason,
                             const std::vector<CommunicatorFlight>& communicators);

// What each rank waits in, or did last: a line each.
std::string FlightRecordLines(const std::vector<CommunicatorFlight>& communicators);

}  // namespace jaxcomm

#endif  // JAXCOMM_FFI_FLIGHT_FLIGHT_RECORD_FORMAT_H_
