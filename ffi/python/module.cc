// The extension module: handlers, the calls that set up communicators, and planning.
// The part for NCCL is in module_nccl.cc.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "ffi/backends/host/arena/arena_memory.h"
#include "ffi/backends/host/arena/process_set.h"
#include "ffi/backends/host/local/local_communicator.h"
#include "ffi/backends/host/local/local_timeout.h"
#include "ffi/backends/nccl/kernels/kernels.h"
#include "ffi/core/call_site.h"
#include "ffi/core/communicator.h"
#include "ffi/core/registry.h"
#include "ffi/flight/dump_signal.h"
#include "ffi/flight/flight_dump.h"
#include "ffi/flight/python_stacks.h"
#include "ffi/os/segment.h"
#include "ffi/python/module.h"
#include "ffi/xla/handler.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;

namespace jaxcomm {
namespace {

// {target: {stage: handler}} for jax.ffi.register_ffi_target.
nb::dict Targets(bool has_streams) {
  nb::dict targets;
  for (const Registration& registration : Registrations(has_streams)) {
    nb::dict stages;
    for (const auto& [stage, handler] : registration.stages) {
      stages[stage] = nb::capsule(reinterpret_cast<void*>(handler));
    }
    targets[registration.target.c_str()] = stages;
  }
  return targets;
}

// For jax.ffi.register_ffi_type: the type of the handlers' state.
nb::dict CallSiteType() {
  static xla::ffi::TypeInfo info = xla::ffi::MakeTypeInfo<CallSite>();
  nb::dict type;
  type["type_id"] = nb::capsule(static_cast<void*>(&CallSite::id));
  type["type_info"] = nb::capsule(static_cast<void*>(&info));
  return type;
}

void CreateHost(int64_t key, std::string axes, std::string lane, std::string platform,
                double timeout_seconds, std::vector<std::vector<int64_t>> groups,
                std::shared_ptr<ProcessSet> process_set,
                std::vector<std::vector<int>> processes, uint64_t generation,
                std::string hint_if_late) {
  CommunicatorSpec spec =
      SpecOf(key, std::move(axes), std::move(lane), "host", std::move(platform),
             timeout_seconds, std::move(groups));
  spec.process_set = std::move(process_set);
  spec.processes = std::move(processes);
  spec.generation = generation;
  spec.hint_if_late = std::move(hint_if_late);
  ThrowIfFailed(Registry::Get().Add(MakeLocalCommunicator(std::move(spec))));
}

std::shared_ptr<Segment> CreateSegment(int processes, bool named) {
  if (processes < 1 || processes > kMaxProcesses) {
    throw std::runtime_error(StrCat("shared memory joins at most ", kMaxProcesses,
                                    " processes of a host, not ", processes));
  }
  nb::gil_scoped_release release;
  auto segment = ValueOf(Segment::Create(Arena::Bytes(processes), named));
  Arena::Format(*segment);
  return segment;
}

// Refuses a segment of another size: it would be used beyond its end.
void CheckSize(int64_t bytes, size_t processes) {
  if (processes >= 1 && processes <= kMaxProcesses &&
      bytes == Arena::Bytes(static_cast<int>(processes))) {
    return;
  }
  throw std::runtime_error(StrCat("shared memory of ", bytes, " bytes is not that of ",
                                  processes, " processes"));
}

std::shared_ptr<Segment> AttachSegment(std::string path, int64_t bytes, uint64_t nonce,
                                       int processes) {
  CheckSize(bytes, static_cast<size_t>(processes));
  return ValueOf(Segment::Attach({std::move(path), bytes, nonce}));
}

std::tuple<std::string, int64_t, uint64_t> AddressOf(const Segment& segment) {
  const SegmentAddress& address = segment.address();
  return {address.path, address.bytes, address.nonce};
}

// Peers: (pid, start time, JAX's process index).
std::shared_ptr<ProcessSet> MakeProcessSet(
    std::shared_ptr<Segment> segment,
    const std::vector<std::tuple<int64_t, uint64_t, int>>& peers, int self,
    double grace_seconds) {
  CheckSize(segment->address().bytes, peers.size());
  if (self < 0 || self >= static_cast<int>(peers.size())) {
    throw std::runtime_error(
        StrCat("there is no process ", self, " among ", peers.size()));
  }
  std::vector<Peer> watched;
  for (const auto& [pid, start_time, index] : peers) {
    watched.push_back({pid, start_time, index});
  }
  return std::make_shared<ProcessSet>(std::move(segment), std::move(watched), self,
                                      Grace::OfThisProcess(grace_seconds));
}

void Destroy(int64_t key) {
  // The programs of the waiting ranks continue on this thread and may need the GIL.
  nb::gil_scoped_release release;
  ThrowIfFailed(Registry::Get().Remove(key));
}

nb::dict Stats(int64_t key) {
  nb::dict out;
  std::shared_ptr<Communicator> communicator = Registry::Get().Find(key);
  if (communicator == nullptr) return out;
  CommunicatorStats stats;
  {
    nb::gil_scoped_release release;
    stats = communicator->stats();
  }
  nb::dict calls;
  for (const auto& [name, count] : stats.calls) calls[name.c_str()] = count;
  nb::dict waited_for;
  for (const auto& [process, seconds] : stats.waited_for) {
    waited_for[nb::int_(process)] = seconds;
  }
  out["waited_for"] = waited_for;
  out["bytes"] = stats.bytes;
  out["host_bytes"] = stats.host_bytes;
  out["device_bytes"] = stats.device_bytes;
  out["in_flight"] = stats.in_flight;
  AddNcclStats(*communicator, out);
  out["calls"] = calls;
  nb::gil_scoped_release release;
  communicator = nullptr;  // it may have been closed meanwhile
  return out;
}

nb::dict Counters() {
  const RegistryCounters counters = Registry::Get().counters();
  nb::dict out;
  out["created"] = counters.created;
  out["destroyed"] = counters.destroyed;
  out["live"] = counters.created - counters.destroyed;
  return out;
}

std::string FlightRecord(std::optional<int64_t> key, std::string_view reason) {
  // stats() polls the devices, so that finished operations are recorded as finished.
  for (const auto& communicator : Registry::Get().List()) communicator->stats();
  return FlightRecordOf(key, reason);
}

// Devices: (platform, global ids).
bool PrepareDumps(int process, int processes,
                  std::vector<std::pair<std::string, std::vector<int64_t>>> devices,
                  std::string folder, bool says) {
  PrepareFlightDumps({process, processes, std::move(devices)}, std::move(folder), says);
  return AnswerDumpSignal();
}

// The engines' own sizes, without any communicator.
void BindPlanning(nb::module_& m) {
  m.def(
      "one_shot_bytes",
      [](int size) {
        return size < 2 || size > OneShotArguments::kMostRanks
                   ? int64_t{0}
                   : static_cast<int64_t>(OneShotMemory::kBytes);
      },
      nb::arg("size"),
      "Device memory for small sums of a group of so many ranks; 0 if it has none.");
  m.def("shared_memory_bytes", &ArenaMemory::Bytes, nb::arg("processes"),
        "Bytes of the shared memory of so many processes.");
  m.attr("MOST_SHARING_PROCESSES") = kMaxProcesses;
}

}  // namespace

NB_MODULE(_ffi, m) {
  // A communicator that is part of a CUDA graph keeps its world alive on purpose.
  nb::set_leak_warnings(false);
  m.doc() = "XLA FFI handlers of jaxcomm and the registry of its communicators.";
  m.def("registrations", &Targets, nb::arg("has_streams"),
        "Custom-call targets and their handlers, by stage.");
  m.def("call_site_type", &CallSiteType,
        "The type registration of the handlers' state.");
  m.def("create_host", &CreateHost, nb::arg("key"), nb::arg("axes"), nb::arg("lane"),
        nb::arg("platform"), nb::arg("timeout_seconds"), nb::arg("groups"),
        nb::arg("process_set").none() = nb::none(),
        nb::arg("processes") = std::vector<std::vector<int>>{},
        nb::arg("generation") = 0, nb::arg("hint_if_late") = "",
        "Makes a communicator of the host backend under a key.");
  m.def("set_hint_if_late", &SetHintIfLate, nb::arg("hint"),
        "Why ranks of this process may be unable to come, for errors and notices.");
  m.def("begin_program", &BeginProgram, nb::arg("program"),
        "Calls instantiated after this under the number belong to a new program.");
  nb::class_<Segment>(m, "Segment", "A piece of memory that processes share.")
      .def("address", &AddressOf, "Path, bytes and nonce, for others to attach.")
      .def("forget", &Segment::Forget, "Removes its name, once all have attached.")
      .def("resident_bytes", &Segment::resident_bytes, "Bytes of touched pages.");
  nb::class_<ProcessSet>(m, "ProcessSet", "Processes that share a segment.");
  m.def("create_segment", &CreateSegment, nb::arg("processes"), nb::arg("named"),
        "Makes and formats a segment for a number of processes.");
  m.def(
      "attach_segment", &AttachSegment, nb::arg("path"), nb::arg("bytes"),
      nb::arg("nonce"), nb::arg("processes"),
      "Attaches to a segment that another process made for this number of processes.");
  m.def("shared_memory_layout", &ArenaMemory::LayoutHash,
        "A number that processes must agree on before they share a segment.");
  m.def("process_set", &MakeProcessSet, nb::arg("segment"), nb::arg("peers"),
        nb::arg("self"), nb::arg("grace_seconds") = +Grace::kSeconds,
        "Joins the processes (pid, start time, index) of a segment.");
  m.def("sentinel_thread", &SentinelThread,
        "The id of an idle thread that ends as soon as this process begins to end.");
  m.def(
      "has_ended",
      [](int64_t pid, uint64_t start_time, int64_t thread) {
        return HasEnded({pid, start_time, 0, thread});
      },
      nb::arg("pid"), nb::arg("start_time"), nb::arg("thread"),
      "Whether another process of this host has certainly ended, or begun to.");
  m.def(
      "process_start_time", [](int64_t pid) { return PeerOf(pid, 0).start_time; },
      nb::arg("pid"),
      "When a process started, in clock ticks after boot; 0 if there is no such "
      "process.");
  BindNccl(m);
  BindPlanning(m);
  m.def("destroy", &Destroy, nb::arg("key"),
        "Ends a communicator; calls that wait in it raise.");
  m.def("stats", &Stats, nb::arg("key"),
        "Calls and bytes of a communicator, empty if there is none.");
  m.def(
      "interrupt_waits", [] { Registry::Get().Interrupt(); },
      nb::call_guard<nb::gil_scoped_release>(),
      "Have what ranks of this process wait in now end within a second.");
  m.def("counters", &Counters, "Communicators created, destroyed and live.");
  m.def("flight_record", &FlightRecord, nb::arg("key").none(), nb::arg("reason"),
        nb::call_guard<nb::gil_scoped_release>(),
        "The last operations of a communicator, or of all, as JSON.");
  m.def(
      "prepare_flight_dumps", &PrepareDumps, nb::arg("process"), nb::arg("processes"),
      nb::arg("devices"), nb::arg("folder"), nb::arg("says"),
      "Sets the identity of this process and the folder of its flight records; returns "
      "whether it answers SIGUSR1.");
  m.def(
      "use_stack_server",
      [](int request, int answer, int file) {
        UseStackServer({request, answer, file});
      },
      nb::arg("request"), nb::arg("answer"), nb::arg("file"),
      "Descriptors of the thread that writes the stacks of all Python threads.");
  m.def("dump_flight_records", &DumpFlightRecords, nb::arg("reason"),
        nb::call_guard<nb::gil_scoped_release>(),
        "Writes the flight records after a failure.");
}

}  // namespace jaxcomm
