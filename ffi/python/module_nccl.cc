#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ffi/backends/nccl/engines/device_arena.h"
#include "ffi/backends/nccl/engines/symmetric_memory.h"
#include "ffi/backends/nccl/failure/process_failure.h"
#include "ffi/backends/nccl/nccl_communicator.h"
#include "ffi/backends/nccl/world.h"
#include "ffi/core/communicator.h"
#include "ffi/core/last_resort.h"
#include "ffi/core/registry.h"
#include "ffi/python/module.h"

namespace nb = nanobind;

namespace jaxcomm {
namespace {

// Asked while we wait without the GIL: whether Ctrl-C was pressed.
bool WasInterrupted() {
  using Clock = std::chrono::steady_clock;
  // Python tells its main thread alone.
  static thread_local const bool is_main = syscall(SYS_gettid) == getpid();
  static thread_local Clock::time_point next{};
  if (!is_main || Clock::now() < next) return false;
  next = Clock::now() + std::chrono::milliseconds(50);
  nb::gil_scoped_acquire hold;
  return PyErr_CheckSignals() != 0;
}

// Calls what may wait for other processes, without the GIL. Throws what a signal
// handler raised, if that is why it failed.
template <typename Body>
auto WithoutGil(const Body& body) {
  auto result = [&] {
    nb::gil_scoped_release release;
    return body();
  }();
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  if constexpr (std::is_same_v<decltype(result), Status>) {
    ThrowIfFailed(result);
  } else {
    return ValueOf(std::move(result));
  }
}

nb::dict LoadNcclFrom(const std::vector<std::string>& paths) {
  const NcclLibrary* const library = WithoutGil([&] { return LoadNccl(paths); });
  nb::dict found;
  found["path"] = library->path;
  found["version"] = library->VersionText();
  found["version_code"] = library->version;
  found["driver_version"] =
      StrCat(library->driver_version / 1000, ".", library->driver_version / 10 % 100);
  found["missing"] = library->missing;
  return found;
}

OnFailure ParseOnFailure(const std::string& text) {
  if (text == "raise") return OnFailure::kRaise;
  if (text == "poison") return OnFailure::kPoison;
  if (text == "exit") return OnFailure::kExit;
  throw std::runtime_error(StrCat("unknown on_failure '", text, "'"));
}

using HeldWorld = Held<NcclWorld>;
using HeldHealth = Held<WorldHealth>;
using HeldMemory = Held<SymmetricMemory>;

nb::bytes NcclUniqueId() {
  nccl::UniqueId id;
  WithoutGil([&] {
    const Status status = Nccl().Try(Nccl().nccl.GetUniqueId, &id);
    return status.success() ? status : WithCircumstances(Nccl(), status, nullptr);
  });
  return nb::bytes(id.internal, sizeof(id.internal));
}

// Devices: (global id, local ordinal, rank). Peers: (pid, start time, JAX's process
// index, thread).
HeldWorld MakeNcclWorld(
    int size, const std::vector<std::tuple<int64_t, int, int>>& devices,
    const nb::bytes& unique_id, std::map<std::string, int> numbers, std::string name,
    double timeout_seconds,
    const std::vector<std::tuple<int64_t, uint64_t, int, int64_t>>& peers) {
  std::vector<NcclDevice> local;
  for (const auto& [id, ordinal, rank] : devices) local.push_back({id, ordinal, rank});
  std::vector<Peer> watched;
  for (const auto& [pid, start, index, thread] : peers) {
    watched.push_back({pid, start, index, thread});
  }
  const NcclSettings settings{std::move(numbers), std::move(name)};
  const std::string id(unique_id.c_str(), unique_id.size());
  return HeldWorld(WithoutGil([&] {
    return NcclWorld::Create(Nccl(), size, std::move(local), id, settings,
                             {timeout_seconds, WasInterrupted}, std::move(watched));
  }));
}

void CreateNccl(const HeldWorld& world, int64_t key, std::string axes, std::string lane,
                std::string platform, double timeout_seconds,
                std::vector<std::vector<int64_t>> groups,
                std::vector<std::vector<int>> processes,
                std::map<std::string, int> numbers, std::string name, bool copy_engines,
                bool one_shot, bool device_sizes, uint64_t arena_bytes,
                const std::string& on_failure, bool check) {
  CommunicatorSpec spec =
      SpecOf(key, std::move(axes), std::move(lane), "nccl", std::move(platform),
             timeout_seconds, std::move(groups));
  spec.processes = std::move(processes);
  NcclSpec how{world.of,
               {std::move(numbers), std::move(name)},
               {timeout_seconds, WasInterrupted},
               {copy_engines, one_shot},
               ParseOnFailure(on_failure),
               check};
  how.engines.device_sizes = device_sizes;
  how.engines.arena_bytes = arena_bytes;
  WithoutGil([&]() -> Status {
    ASSIGN_OR_RETURN(std::shared_ptr<Communicator> made,
                     MakeNcclCommunicator(std::move(spec), std::move(how)));
    return Registry::Get().Add(std::move(made));
  });
}

std::shared_ptr<NcclCommunicator> FindNccl(int64_t key) {
  auto communicator =
      std::dynamic_pointer_cast<NcclCommunicator>(Registry::Get().Find(key));
  if (communicator == nullptr) {
    throw std::runtime_error("there is no live communicator of NCCL with this key");
  }
  return communicator;
}

std::string RegisterMemory(int64_t key, const HeldMemory& memory) {
  return WithoutGil([&] { return FindNccl(key)->Register(memory.of); });
}

void DeregisterMemory(int64_t key, const HeldMemory& memory) {
  nb::gil_scoped_release release;
  FindNccl(key)->Deregister(*memory.of);
}

void PrepareDataDependent(int64_t key) {
  WithoutGil([&] { return FindNccl(key)->PrepareDataDependent(); });
}

void FailWorlds(const std::string& reason) {
  nb::gil_scoped_release release;
  ProcessFailure::Get().FailAllElsewhere(reason);
}

}  // namespace

const NcclLibrary& Nccl() {
  // No call of CUDA or NCCL makes sense any more.
  if (DevicesAreStopped()) ThrowIfFailed(DevicesStoppedError());
  const NcclLibrary* library = LoadedNccl();
  if (library == nullptr) throw std::runtime_error("NCCL is not loaded");
  return *library;
}

void AddNcclStats(const Communicator& communicator, nb::dict& stats) {
  const auto* of_nccl = dynamic_cast<const NcclCommunicator*>(&communicator);
  if (of_nccl == nullptr) return;
  const NcclStats found = of_nccl->nccl_stats();
  stats["symmetric_calls"] = found.symmetric_calls;
  stats["copied_calls"] = found.copied_calls;
  stats["one_shot_calls"] = found.one_shot_calls;
  stats["device_sized_calls"] = found.device_sized_calls;
  stats["one_shot"] = found.one_shot;
  stats["copies"] = found.copies;
  stats["device_sizes"] = found.device_sizes;
}

void BindNccl(nb::module_& m) {
  m.def("load_nccl", &LoadNcclFrom, nb::arg("paths"),
        "Loads NCCL and the CUDA driver, and says what was found.");
  m.def("nccl_unique_id", &NcclUniqueId, "What the ranks of a new world know it by.");
  nb::class_<HeldHealth>(m, "NcclWorldHealth",
                         "What a world's processes know of each other's ends.")
      .def(
          "is_broken", [](const HeldHealth& health) { return health.of->is_broken(); },
          "Whether a communicator of the world was, or is to be, ended by force.")
      .def(
          "gone", [](const HeldHealth& health) { return health.of->gone(); },
          "Processes that this one saw end, by JAX's index.")
      .def(
          "settle", [](const HeldHealth& health) { health.of->Settle(); },
          "Lets this process abort what it has poisoned: so have all others.");
  nb::class_<HeldWorld>(m, "NcclWorld", nb::is_weak_referenceable(),
                        "The NCCL communicator of a whole mesh.")
      .def_prop_ro(
          "device_bytes",
          [](const HeldWorld& world) { return world.of->device_bytes(); },
          "Device memory it took, on the devices of this process.")
      .def_prop_ro(
          "health",
          [](const HeldWorld& world) { return HeldHealth(world.of->health()); },
          "Outlives it.")
      .def_prop_ro(
          "is_broken", [](const HeldWorld& world) { return world.of->is_broken(); },
          "Whether one that was split off it was ended by force.");
  m.def("nccl_world", &MakeNcclWorld, nb::arg("size"), nb::arg("devices"),
        nb::arg("unique_id"), nb::arg("numbers"), nb::arg("name"),
        nb::arg("timeout_seconds"), nb::arg("peers"),
        "Joins the ranks that know the id; devices are (global id, ordinal, rank).");
  m.def("create_nccl", &CreateNccl, nb::arg("world"), nb::arg("key"), nb::arg("axes"),
        nb::arg("lane"), nb::arg("platform"), nb::arg("timeout_seconds"),
        nb::arg("groups"), nb::arg("processes"), nb::arg("numbers"), nb::arg("name"),
        nb::arg("copy_engines"), nb::arg("one_shot"), nb::arg("device_sizes"),
        nb::arg("arena_bytes"), nb::arg("on_failure"), nb::arg("check"),
        "Splits a communicator off a world, under a key.");
  m.def("prepare_data_dependent", &PrepareDataDependent, nb::arg("key"),
        "Makes what collectives need whose moves depend on numbers of devices.");
  BindSymmetricMemory(m);
  m.def("arena_bytes", &DeviceArena::TotalBytes,
        nb::call_guard<nb::gil_scoped_release>(),
        "Device memory that other ranks map, on the devices of this process.");
  m.def(
      "refuse_if_stopped",
      [] {
        if (DevicesAreStopped()) ThrowIfFailed(DevicesStoppedError());
      },
      "Raises if the GPUs of this process were stopped.");
  m.def(
      "first_failure", [] { return ProcessFailure::Get().first(); },
      "What failed first of this process's collectives over NCCL, or \"\".");
  m.def(
      "forget_failures", [] { ProcessFailure::Get().Forget(); },
      "Has first_failure() tell of those that come: all communicators are closed.");
  m.def(
      "wait_for_aborts",
      [](double seconds) { return ProcessFailure::Get().WaitForAborts(seconds); },
      nb::arg("seconds"), nb::call_guard<nb::gil_scoped_release>(),
      "Waits for threads that abort operations of NCCL; returns whether all are done.");
  m.def("end_process", &EndProcess, nb::arg("text"),
        nb::call_guard<nb::gil_scoped_release>(),
        "Ends this process with a message, flight records and status 70.");
  m.def("fail_worlds", &FailWorlds, nb::arg("reason"),
        "Fails the communicators of NCCL that span processes: another process failed.");
  m.def("register_memory", &RegisterMemory, nb::arg("key"), nb::arg("memory"),
        "Registers it with a communicator; returns how, or why not.");
  m.def("deregister_memory", &DeregisterMemory, nb::arg("key"), nb::arg("memory"),
        "Undoes it here, where other processes have it otherwise.");
}

}  // namespace jaxcomm
