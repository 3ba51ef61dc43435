#include "ffi/flight/flight_record_format.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <map>

#include "ffi/base/status.h"

namespace jaxcomm {
namespace {

using Entry = FlightRecorder::Entry;
using State = FlightRecorder::State;

const char* StateName(State state) {
  constexpr const char* kNames[] = {"started", "completed", "failed"};
  return kNames[static_cast<int>(state)];
}

// Ignores the locale, which may write 1.000,5.
std::string Fixed(double value, int digits) {
  double scale = 1;
  for (int i = 0; i < digits; ++i) scale *= 10;
  const auto whole = static_cast<int64_t>(value);
  auto fraction = std::to_string(
      static_cast<int64_t>((value - static_cast<double>(whole)) * scale + 0.5));
  if (static_cast<int>(fraction.size()) > digits) {  // rounded up to one
    return StrCat(whole + 1, ".", std::string(digits, '0'));
  }
  fraction.insert(0, digits - fraction.size(), '0');
  return StrCat(whole, ".", fraction);
}

std::string Hex(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof(text), "\"%016llx\"",
                static_cast<unsigned long long>(value));
  return text;
}

// A JSON string of UTF-8 text.
std::string Quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", c);
      out += escape;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

template <typename List, typename ToText>
std::string Joined(const List& list, std::string_view separator, ToText to_text) {
  std::string out;
  for (const auto& item : list) {
    if (!out.empty()) out += separator;
    out += to_text(item);
  }
  return out;
}

std::string Ids(const std::vector<int64_t>& ids) {
  return "[" + Joined(ids, ", ", [](int64_t id) { return std::to_string(id); }) + "]";
}

std::string EntryJson(const Entry& entry) {
  const Operation& operation = *entry.operation;
  const std::string seconds =
      entry.state == State::kStarted ? "null" : Fixed(entry.seconds, 9);
  return StrCat("    {\"sequence\": ", entry.sequence, ", \"rank\": ", entry.rank,
                ", \"group\": ", entry.group, ", \"device\": ", entry.device,
                ", \"run_id\": ", entry.run_id, ", \"site\": ", Hex(entry.tag),
                ", \"collective\": ", Quoted(operation.collective),
                ", \"name\": ", Quoted(operation.name),
                ", \"operands\": ", Quoted(operation.operands),
                ", \"dtype\": ", Quoted(operation.dtype),
                ", \"bytes\": ", operation.bytes,
                ", \"signature\": ", Hex(operation.signature), ", \"state\": \"",
                StateName(entry.state), "\", \"started\": ", Fixed(entry.started, 6),
                ", \"seconds\": ", seconds, "}");
}

std::string CommunicatorJson(const CommunicatorFlight& flight) {
  const CommunicatorSummary& of = flight.of;
  return StrCat("  {\"key\": ", Hex(static_cast<uint64_t>(of.key)),
                ", \"axes\": ", Quoted(of.axes), ", \"lane\": ", Quoted(of.lane),
                ", \"backend\": ", Quoted(of.backend),
                ", \"platform\": ", Quoted(of.platform), ", \"groups\": [",
                Joined(of.groups, ", ", Ids),
                "], \"timeout_seconds\": ", Fixed(of.timeout_seconds, 3),
                ", \"closed\": ", flight.closed ? "true" : "false",
                ", \"entries\": [\n", Joined(flight.entries, ",\n", EntryJson), "]}");
}

// When this process loaded the package. Only processes that loaded it earlier have
// older records.
const double kBegan = UnixSeconds();

std::string HostName() {
  char name[256] = "";
  gethostname(name, sizeof(name) - 1);
  return name;
}

}  // namespace

double UnixSeconds() {
  return std::chrono::duration<double>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::string FlightRecordJson(const ProcessDescription& process, std::string_view reason,
                             const std::vector<CommunicatorFlight>& communicators,
                             std::string_view stacks) {
  const auto devices = [](const auto& entry) {
    return StrCat(Quoted(entry.first), ": ", Ids(entry.second));
  };
  return StrCat("{\"version\": 1, \"process\": ", process.process,
                ", \"processes\": ", process.processes, ", \"pid\": ", getpid(),
                ", \"host\": ", Quoted(HostName()), ", \"began\": ", Fixed(kBegan, 6),
                ", \"time\": ", Fixed(UnixSeconds(), 6),
                ", \"reason\": ", Quoted(reason), ", \"devices\": {",
                Joined(process.devices, ", ", devices),
                "}, \"stacks\": ", Quoted(stacks), ",\n \"communicators\": [\n",
                Joined(communicators, ",\n", CommunicatorJson), "]}\n");
}

std::string FlightRecordLines(const std::vector<CommunicatorFlight>& communicators) {
  const double now = UnixSeconds();
  std::string lines;
  for (const CommunicatorFlight& flight : communicators) {
    const CommunicatorSummary& of = flight.of;
    // Pending operations, else the last one. Entries come oldest first.
    std::map<std::pair<int, int>, std::vector<const Entry*>> shown;
    for (const Entry& entry : flight.entries) {
      auto& of_rank = shown[{entry.group, entry.rank}];
      if (!of_rank.empty() && of_rank.back()->state != State::kStarted) {
        of_rank.pop_back();
      }
      if (of_rank.empty() || entry.state == State::kStarted) of_rank.push_back(&entry);
    }
    for (const auto& [member, entries] : shown) {
      for (const Entry* entry : entries) {
        const std::string what =
            StrCat(entry->operation->name, "(", entry->operation->operands, ") #",
                   entry->sequence);
        const bool open = entry->state == State::kStarted;
        const std::string seconds =
            Fixed(now - entry->started - (open ? 0 : entry->seconds), 1);
        lines += StrCat(
            "  axes ", of.axes, ", lane '", of.lane, "': rank ", entry->rank, " of ",
            of.groups[entry->group].size(), " (", of.platform, ":", entry->device, ") ",
            open ? StrCat("has been in ", what, " for ", seconds, " s")
                 : StrCat(StateName(entry->state), " ", what, " ", seconds, " s ago"),
            "\n");
      }
    }
  }
  return lines;
}

}  // namespace jaxcomm
