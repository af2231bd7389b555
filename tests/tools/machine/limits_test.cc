// Limits of containers, as kernels tell them: cgroups of both versions, nested, and none.
#include "tools/machine/limits.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "tests/testing/temp_folder.h"

namespace tessera::tools {
namespace {

constexpr std::int64_t kGiB = std::int64_t{1} << 30;

/// A machine of 16 GiB with 64 processors.
class LimitsTest : public ::testing::Test {
 protected:
  LimitsTest() {
    write("proc/meminfo",
          "MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:    8388608 kB\n");
    std::string processors;
    for (int i = 0; i < 64; ++i) processors += "processor\t: " + std::to_string(i) + "\n\n";
    write("proc/cpuinfo", processors);
  }
  void write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(root_ / name).parent_path());
    root_.write(name, text);
  }
  MachineLimits read() const { return read_limits(root_.path()); }

  const testing::TempFolder root_;
};

TEST_F(LimitsTest, WithoutCgroupsTheMachineIsTheLimit) {
  const MachineLimits limits = read();
  EXPECT_EQ(limits.num_cores, 64);
  EXPECT_GE(limits.num_allowed, 1);
  EXPECT_FALSE(limits.cpu_quota.has_value());
  EXPECT_EQ(limits.memory_nbytes, 16 * kGiB);
  EXPECT_EQ(limits.available_nbytes, 8 * kGiB);
  EXPECT_EQ(limits.usable_nbytes(), 8 * kGiB);
  EXPECT_EQ(limits.usable_cores(), limits.num_allowed);
}

TEST_F(LimitsTest, TheLowestOfNestedCgroupsCounts) {
  write("proc/self/cgroup", "0::/slice/job\n");
  write("sys/fs/cgroup/slice/job/cpu.max", "300000 100000\n");
  write("sys/fs/cgroup/slice/cpu.max", "150000 100000\n");
  write("sys/fs/cgroup/cpu.max", "max 100000\n");
  write("sys/fs/cgroup/slice/job/memory.max", "6442450944\n");
  write("sys/fs/cgroup/slice/job/memory.current", "2147483648\n");
  write("sys/fs/cgroup/slice/job/memory.stat", "anon 5\ninactive_file 1073741824\n");
  write("sys/fs/cgroup/slice/memory.max", "max\n");
  const MachineLimits limits = read();
  EXPECT_EQ(limits.cpu_quota, 1.5);
  EXPECT_EQ(limits.cgroup_limit_nbytes, 6 * kGiB);
  EXPECT_EQ(limits.cgroup_used_nbytes, kGiB);  // the cache can be had back
  EXPECT_EQ(limits.usable_nbytes(), 5 * kGiB);
  write("sys/fs/cgroup/slice/job/cpu.max", "60000 50000\n");
  EXPECT_EQ(read().cpu_quota, 1.2);
}

TEST_F(LimitsTest, TakesTheLeastRoomOfNestedGroups) {
  write("proc/self/cgroup", "0::/slice/job\n");
  write("sys/fs/cgroup/slice/job/memory.max", "4294967296\n");
  write("sys/fs/cgroup/slice/job/memory.current", "0\n");
  write("sys/fs/cgroup/slice/memory.max", "8589934592\n");
  write("sys/fs/cgroup/slice/memory.current", "7516192768\n");
  const MachineLimits limits = read();
  EXPECT_EQ(limits.cgroup_limit_nbytes, 8 * kGiB);
  EXPECT_EQ(limits.usable_nbytes(), kGiB);
}

TEST_F(LimitsTest, VersionOneIsRead) {
  write("proc/self/cgroup", "4:cpu,cpuacct:/a\n3:memory:/b\n1:name=systemd:/\n");
  write("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "100000\n");
  write("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "50000\n");
  write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  write("sys/fs/cgroup/memory/b/memory.limit_in_bytes", "3221225472\n");
  write("sys/fs/cgroup/memory/b/memory.usage_in_bytes", "1073741824\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  const MachineLimits limits = read();
  EXPECT_EQ(limits.cpu_quota, 2.0);
  EXPECT_EQ(limits.cgroup_limit_nbytes, 3 * kGiB);
  EXPECT_EQ(limits.usable_nbytes(), 2 * kGiB);
}

TEST_F(LimitsTest, ALimitAboveTheMachineIsNone) {
  write("proc/self/cgroup", "0::/\n");
  write("sys/fs/cgroup/memory.max", std::to_string(16 * kGiB) + "\n");
  EXPECT_FALSE(read().cgroup_limit_nbytes.has_value());
}

TEST_F(LimitsTest, NonsenseIsNoLimit) {
  write("proc/self/cgroup", "nonsense\n0:\n0::relative\n0::/../../other\n0::/job\n");
  write("sys/fs/cgroup/job/cpu.max", "fast\n");
  write("sys/fs/cgroup/job/memory.max", "-7\n");
  write("sys/fs/cgroup/cpu.max", "100000 0\n");
  const MachineLimits limits = read();
  EXPECT_FALSE(limits.cpu_quota.has_value());
  EXPECT_FALSE(limits.cgroup_limit_nbytes.has_value());
}

TEST(MachineLimits, AtLeastOneCoreCanBeUsed) {
  const auto usable = [](int allowed, std::optional<double> quota) {
    return MachineLimits{.num_cores = 8, .num_allowed = allowed, .cpu_quota = quota}.usable_cores();
  };
  EXPECT_EQ(usable(8, {}), 8);
  EXPECT_EQ(usable(8, 1.5), 2);
  EXPECT_EQ(usable(8, 0.2), 1);
  EXPECT_EQ(usable(4, 16.0), 4);
  EXPECT_EQ(usable(0, {}), 1);
}

TEST(MachineLimits, OfThisMachineCanBeRead) {
  const MachineLimits limits = read_limits();
  EXPECT_GE(limits.num_cores, limits.num_allowed);
  EXPECT_GT(limits.memory_nbytes, 0);
  EXPECT_GT(limits.usable_nbytes(), 0);
}

}  // namespace
}  // namespace tessera::tools
