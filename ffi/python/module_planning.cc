// The part of the module for planning: the engines' own rules and sizes, without any
// communicator.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <string>
#include <tuple>

#include "ffi/backends/host/arena_memory.h"
#include "ffi/backends/nccl/engine_choice.h"
#include "ffi/flight/flight_recorder.h"
#include "ffi/python/module.h"

namespace nb = nanobind;

namespace jaxcomm {
namespace {

std::tuple<std::string, std::string> ChooseEngine(
    int size, bool only_moves, bool moves_along_pairs, int64_t bytes_sent,
    int64_t copies, int sums, int64_t words_of_largest_sum, bool copy_engines,
    bool one_shot, bool can_copy, bool can_add) {
  CallFacts call;
  call.size = size;
  call.only_moves = only_moves;
  call.moves_along_pairs = moves_along_pairs;
  call.bytes_sent = bytes_sent;
  call.copies = copies;
  call.sums = sums;
  call.words_of_largest_sum = words_of_largest_sum;
  EngineTopology topology;
  topology.can_copy = can_copy;
  topology.can_add = can_add;
  topology.sums_left = ~uint32_t{0};
  const EngineChoice choice = Choose(call, {copy_engines, one_shot}, topology);
  return {EngineName(choice.kind), choice.reason};
}

}  // namespace

void BindPlanning(nb::module_& m) {
  m.def("choose_engine", &ChooseEngine, nb::kw_only(), nb::arg("size"),
        nb::arg("only_moves"), nb::arg("moves_along_pairs"), nb::arg("bytes_sent"),
        nb::arg("copies"), nb::arg("sums"), nb::arg("words_of_largest_sum"),
        nb::arg("copy_engines"), nb::arg("one_shot"), nb::arg("can_copy"),
        nb::arg("can_add"),
        "Says which engine of the nccl backend would do a call, and why: the rule that "
        "communicators follow.");
  m.def(
      "one_shot_bytes",
      [](int size) {
        return size < 2 || size > OneShotArguments::kMostRanks
                   ? int64_t{0}
                   : static_cast<int64_t>(OneShotArguments::InboxBytes(size));
      },
      nb::arg("size"),
      "Device memory for small sums of a group of so many ranks; 0 if it has none.");
  m.def("shared_memory_bytes", &ArenaMemory::Bytes, nb::arg("processes"),
        "Bytes of the shared memory of so many processes.");
  m.def("flight_record_bytes", &FlightRecorder::HostBytes, nb::arg("ranks"),
        nb::arg("used"),
        "Host memory of the flight record of a communicator of so many ranks, of which "
        "some in this process have done something.");
  m.attr("MOST_SHARING_PROCESSES") = kMaxProcesses;
}

}  // namespace jaxcomm
