// The only file that sees Python: handlers and the calls that set up
// communicators.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "ffi/backends/host/local.h"
#include "ffi/call_site.h"
#include "ffi/communicator.h"
#include "ffi/handlers/collectives.h"
#include "ffi/handlers/handler.h"
#include "ffi/registry.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;

namespace jaxcomm {
namespace {

void ThrowIfFailed(const Status& status) {
  if (status.failure()) throw std::runtime_error(status.message());
}

// {target: {stage: handler}} for jax.ffi.register_ffi_target.
nb::dict Registrations() {
  nb::dict targets;
  for (const Collective& collective : kCollectives) {
    nb::dict stages;
    stages["instantiate"] = nb::capsule(reinterpret_cast<void*>(&InstantiateHandler));
    stages["execute"] = nb::capsule(reinterpret_cast<void*>(&ExecuteHandler));
    targets[StrCat("jaxcomm.", collective.name).c_str()] = stages;
  }
  return targets;
}

// What jax.ffi.register_ffi_type needs for the handlers' state.
nb::dict CallSiteType() {
  static xla::ffi::TypeInfo info = xla::ffi::MakeTypeInfo<CallSite>();
  nb::dict type;
  type["type_id"] = nb::capsule(static_cast<void*>(&CallSite::id));
  type["type_info"] = nb::capsule(static_cast<void*>(&info));
  return type;
}

void CreateHost(int64_t key, std::string axes, std::string lane, std::string platform,
                double timeout_seconds, std::vector<std::vector<int64_t>> groups) {
  CommunicatorSpec spec;
  spec.key = key;
  spec.axes = std::move(axes);
  spec.lane = std::move(lane);
  spec.backend = "host";
  spec.platform = std::move(platform);
  spec.timeout_seconds = timeout_seconds;
  spec.groups = std::move(groups);
  ThrowIfFailed(Registry::Get().Add(MakeLocalCommunicator(std::move(spec))));
}

void Destroy(int64_t key) {
  // Waiting ranks fail, and their programs run on: they may need the GIL.
  nb::gil_scoped_release release;
  ThrowIfFailed(Registry::Get().Remove(key));
}

nb::dict Stats(int64_t key) {
  nb::dict out;
  const std::shared_ptr<Communicator> communicator = Registry::Get().Find(key);
  if (communicator == nullptr) return out;
  const CommunicatorStats stats = communicator->stats();
  nb::dict calls;
  for (const auto& [name, count] : stats.calls) calls[name.c_str()] = count;
  out["bytes"] = stats.bytes;
  out["host_bytes"] = stats.host_bytes;
  out["in_flight"] = stats.in_flight;
  out["calls"] = calls;
  return out;
}

nb::dict Counters() {
  const RegistryCounters counters = Registry::Get().counters();
  nb::dict out;
  out["created"] = counters.created;
  out["destroyed"] = counters.destroyed;
  out["live"] = counters.live;
  return out;
}

}  // namespace

NB_MODULE(_ffi, m) {
  m.doc() = "XLA FFI handlers of jaxcomm and the registry of its communicators.";
  m.def("registrations", &Registrations,
        "Custom-call targets and their handlers, by stage.");
  m.def("call_site_type", &CallSiteType,
        "The type registration of the handlers' state.");
  m.def("create_host", &CreateHost, nb::arg("key"), nb::arg("axes"), nb::arg("lane"),
        nb::arg("platform"), nb::arg("timeout_seconds"), nb::arg("groups"),
        "Makes a communicator of the host backend under a key.");
  m.def("destroy", &Destroy, nb::arg("key"),
        "Ends a communicator; whoever waits in it gets an error.");
  m.def("stats", &Stats, nb::arg("key"),
        "Calls and bytes of a communicator, empty if there is none.");
  m.def("counters", &Counters, "Communicators created, destroyed and live.");
}

}  // namespace jaxcomm
