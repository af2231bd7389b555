// Limits of containers, as kernels tell them: cgroups of both versions, nested, and none.
#include "tools/machine/limits.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <thread>
#include <vector>

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

TEST_F(LimitsTest, TheCacheOfFilesCanBeHadBackMappedOrNot) {
  write("proc/self/cgroup", "0::/job\n");
  write("sys/fs/cgroup/job/memory.max", "4294967296\n");
  write("sys/fs/cgroup/job/memory.current", "3221225472\n");
  write("sys/fs/cgroup/job/memory.stat",
        "anon 1073741824\nfile 2147483648\ninactive_file 536870912\nactive_file 1073741824\n"
        "slab_reclaimable 268435456\nslab_unreclaimable 268435456\n");
  EXPECT_EQ(read().cgroup_used_nbytes, kGiB + kGiB / 4);
  EXPECT_EQ(read().usable_nbytes(), 3 * kGiB - kGiB / 4);
}

TEST_F(LimitsTest, TheCacheOfFilesCanBeHadBackInVersion1) {
  write("proc/self/cgroup", "3:memory:/b\n");
  write("sys/fs/cgroup/memory/b/memory.limit_in_bytes", "3221225472\n");
  write("sys/fs/cgroup/memory/b/memory.usage_in_bytes", "2147483648\n");
  write("sys/fs/cgroup/memory/b/memory.stat",
        "active_file 1\ntotal_inactive_file 536870912\ntotal_active_file 536870912\n");
  EXPECT_EQ(read().cgroup_used_nbytes, kGiB);
}

TEST_F(LimitsTest, TheLeastRoomOfAllThatLimitsIsTold) {
  using By = MemoryRoom::By;
  const auto room = [&] { return read().memory_room().value(); };
  EXPECT_EQ(room().by, By::kMachine);
  EXPECT_EQ(room().nbytes, 8 * kGiB);
  EXPECT_EQ(room().limit_nbytes, 16 * kGiB);
  write("proc/self/cgroup", "0::/job\n");
  write("sys/fs/cgroup/job/memory.max", "4294967296\n");
  write("sys/fs/cgroup/job/memory.current", "1073741824\n");
  EXPECT_EQ(room().by, By::kCgroup);
  EXPECT_EQ(room().nbytes, 3 * kGiB);
  EXPECT_EQ(room().limit_nbytes, 4 * kGiB);
  write("sys/fs/cgroup/job/memory.current", "5368709120\n");  // as it may be for a moment
  EXPECT_EQ(room().nbytes, 0);
  EXPECT_FALSE(MachineLimits{}.memory_room().has_value());
}

TEST_F(LimitsTest, SwapIsRoomAsFarAsTheCgroupMayTakeIt) {
  write("proc/meminfo",
        "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nSwapTotal: 4194304 kB\n"
        "SwapFree: 2097152 kB\n");
  EXPECT_EQ(read().memory_room()->nbytes, 10 * kGiB);
  EXPECT_EQ(read().usable_nbytes(), 8 * kGiB) << "without swapping";
  write("proc/self/cgroup", "0::/job\n");
  write("sys/fs/cgroup/job/memory.max", "4294967296\n");
  write("sys/fs/cgroup/job/memory.current", "1073741824\n");
  EXPECT_EQ(read().memory_room()->nbytes, 5 * kGiB) << "all that is free";
  write("sys/fs/cgroup/job/memory.swap.max", "1610612736\n");
  write("sys/fs/cgroup/job/memory.swap.current", "536870912\n");
  EXPECT_EQ(read().memory_room()->nbytes, 4 * kGiB);
  write("sys/fs/cgroup/job/memory.swap.max", "0\n");
  EXPECT_EQ(read().memory_room()->nbytes, 3 * kGiB);
}

TEST_F(LimitsTest, OfVersion1MemoryAndSwapHaveOneLimit) {
  write("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nSwapFree: 2097152 kB\n");
  write("proc/self/cgroup", "3:memory:/b\n");
  write("sys/fs/cgroup/memory/b/memory.limit_in_bytes", "3221225472\n");
  write("sys/fs/cgroup/memory/b/memory.usage_in_bytes", "1073741824\n");
  write("sys/fs/cgroup/memory/b/memory.memsw.limit_in_bytes", "4294967296\n");
  write("sys/fs/cgroup/memory/b/memory.memsw.usage_in_bytes", "1610612736\n");
  EXPECT_EQ(read().memory_room()->nbytes, 2 * kGiB + kGiB / 2);
}

TEST_F(LimitsTest, ALimitOfAddressesCountsWhatIsMapped) {
  const std::int64_t page = ::sysconf(_SC_PAGESIZE);
  write("proc/self/statm", std::to_string(kGiB / page) + " 5 4 3 0 2 0\n");
  EXPECT_FALSE(read().address_limit_nbytes.has_value());
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  rlimit lower = before;
  lower.rlim_cur = 6 * kGiB;
  ASSERT_EQ(setrlimit(RLIMIT_AS, &lower), 0);
  const MachineLimits limits = read();
  ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
  EXPECT_EQ(limits.address_limit_nbytes, 6 * kGiB);
  EXPECT_EQ(limits.memory_room()->by, MemoryRoom::By::kAddressSpace);
  EXPECT_EQ(limits.memory_room()->nbytes, 5 * kGiB);
}

TEST_F(LimitsTest, CoresAreThoseOfTheProcessWhateverAThreadIsKeptTo) {
  const std::vector<std::size_t> before = allowed_cores();
  ASSERT_FALSE(before.empty());
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(before.back(), &one);
  std::jthread([&] {
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    EXPECT_EQ(allowed_cores(), before);
  }).join();
  cpu_set_t all;
  ASSERT_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  EXPECT_EQ(allowed_cores(), std::vector<std::size_t>{before.back()});
  EXPECT_EQ(read().usable_cores(), 1) << "of 64 processors";
  ASSERT_EQ(sched_setaffinity(0, sizeof(all), &all), 0);
}

}  // namespace
}  // namespace tessera::tools
