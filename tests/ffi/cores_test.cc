// Tests how many cores this process may use, in copies of Linux's file trees.
#include "ffi/os/cores.h"

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/ffi/check.h"

namespace jaxcomm::testing {
namespace {

// A root folder that is gone afterwards.
struct Root {
  Root() {
    char name[] = "/tmp/cores_test.XXXXXX";
    path = mkdtemp(name);
  }
  ~Root() { std::filesystem::remove_all(path); }
  void Write(const std::string& file, const std::string& text) const {
    const std::filesystem::path full = path + file;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << text;
  }
  std::string path;
};

TEST(a_system_without_cgroups_has_no_quota) {
  Root root;
  CHECK_TRUE(std::isinf(CpuQuota(root.path)));
}

TEST(the_quota_of_the_cgroup_counts) {
  Root root;
  root.Write("/proc/self/cgroup", "0::/\n");
  root.Write("/sys/fs/cgroup/cpu.max", "max 100000\n");
  CHECK_TRUE(std::isinf(CpuQuota(root.path)));
  root.Write("/sys/fs/cgroup/cpu.max", "400000 100000\n");
  CHECK_EQ(CpuQuota(root.path), 4.0);
}

TEST(the_smallest_quota_of_the_cgroups_above_counts) {
  Root root;
  root.Write("/proc/self/cgroup", "0::/job/step/task\n");
  root.Write("/sys/fs/cgroup/job/step/task/cpu.max", "800000 100000\n");
  root.Write("/sys/fs/cgroup/job/cpu.max", "150000 100000\n");
  CHECK_EQ(CpuQuota(root.path), 1.5);
}

TEST(version_1_has_its_own_files) {
  Root root;
  root.Write("/proc/self/cgroup", "3:cpuset:/a\n2:cpu,cpuacct:/docker/id\n0::/\n");
  // A container sees its own group mounted at the top, whatever /proc says.
  root.Write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  root.Write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "50000\n");
  CHECK_TRUE(std::isinf(CpuQuota(root.path)));
  root.Write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "100000\n");
  CHECK_EQ(CpuQuota(root.path), 2.0);
}

TEST(a_broken_file_is_no_quota) {
  Root root;
  root.Write("/proc/self/cgroup", "::::\n\n0::no/slash\nx\n0::/\n");
  root.Write("/sys/fs/cgroup/cpu.max", "100000\n");
  CHECK_TRUE(std::isinf(CpuQuota(root.path)));
  root.Write("/sys/fs/cgroup/cpu.max", "0 0\n");
  CHECK_TRUE(std::isinf(CpuQuota(root.path)));
}

TEST(only_whole_cores_count_and_at_least_one) {
  CHECK_EQ(UsableCores(96, INFINITY), 96);
  CHECK_EQ(UsableCores(96, 4.0), 4);
  CHECK_EQ(UsableCores(96, 3.9), 3);
  CHECK_EQ(UsableCores(96, 0.5), 1);
  CHECK_EQ(UsableCores(2, 8.0), 2);
  CHECK_EQ(UsableCores(0, INFINITY), 1);
}

}  // namespace
}  // namespace jaxcomm::testing
