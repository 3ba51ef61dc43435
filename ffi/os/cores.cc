#include "ffi/os/cores.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string>

#include "ffi/os/system_file.h"

namespace jaxcomm {
namespace {

constexpr double kNoQuota = std::numeric_limits<double>::infinity();

// How many cores a quota of each period is worth. No quota if a number is missing or
// not positive.
double Quota(const std::string& quota, const std::string& period) {
  const double time = std::strtod(quota.c_str(), nullptr);
  const double of = std::strtod(period.c_str(), nullptr);
  return time > 0 && of > 0 ? time / of : kNoQuota;
}

// cpu.max of version 2 holds "<quota or max> <period>".
double QuotaOf(const std::string& folder) {
  const std::string max = ReadSystemFile(folder + "/cpu.max");
  const size_t space = std::min(max.find(' '), max.size());
  return std::min(Quota(max.substr(0, space), max.substr(space)),
                  Quota(ReadSystemFile(folder + "/cpu.cfs_quota_us"),
                        ReadSystemFile(folder + "/cpu.cfs_period_us")));
}

// The smallest quota of a cgroup and of those above it.
double QuotaUpwards(const std::string& mount, std::string cgroup) {
  double quota = kNoQuota;
  while (true) {
    while (!cgroup.empty() && cgroup.back() == '/') cgroup.pop_back();
    quota = std::min(quota, QuotaOf(mount + cgroup));
    // In a container, /proc may name a cgroup that the container does not see. The
    // container's own cgroup is then mounted at the top.
    const size_t slash = cgroup.rfind('/');
    if (slash == std::string::npos) return quota;
    cgroup.resize(slash);
  }
}

}  // namespace

double CpuQuota(const std::string& root) {
  double quota = kNoQuota;
  // Lines "<number>:<controllers of version 1>:<path>".
  const std::string lines = ReadSystemFile(root + "/proc/self/cgroup");
  for (size_t begin = 0, end = 0; begin < lines.size(); begin = end + 1) {
    end = std::min(lines.find('\n', begin), lines.size());
    const std::string line = lines.substr(begin, end - begin);
    const size_t first = line.find(':');
    const size_t second =
        first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers =
        "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string cgroup = line.substr(second + 1);
    if (controllers == ",,") {
      quota = std::min(quota, QuotaUpwards(root + "/sys/fs/cgroup", cgroup));
    } else if (controllers.find(",cpu,") != std::string::npos) {
      for (const char* mount : {"/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"}) {
        quota = std::min(quota, QuotaUpwards(root + mount, cgroup));
      }
    }
  }
  return quota;
}

int UsableCores(int processors, double quota) {
  // Rounds down: nobody should spin on half a core.
  return std::max(1, quota < processors ? static_cast<int>(quota) : processors);
}

int Cores() {
  static const int cores =
      UsableCores(static_cast<int>(std::thread::hardware_concurrency()), CpuQuota());
  return cores;
}

}  // namespace jaxcomm
