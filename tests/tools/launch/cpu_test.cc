// What the trainers choose of the CPU.
#include "tools/launch/cpu.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <cstdlib>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "engine/cpu_choice.h"
#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tools/launch/cpu_wishes.h"

namespace tessera::tools {
namespace {

using testing::error_of;
using testing::has;

// The cores that a thread of its own may use after pin_rank().
std::vector<int> cores_of(const CpuConfig& config, const LocalRanks& ranks, int rank) {
  std::vector<int> cores;
  std::jthread([&] {
    pin_rank(config, ranks, rank);
    std::jthread([&] {  // inherits them
      cpu_set_t own;
      sched_getaffinity(0, sizeof(own), &own);
      for (int core = 0; core < CPU_SETSIZE; ++core) {
        if (CPU_ISSET(static_cast<std::size_t>(core), &own)) cores.push_back(core);
      }
    })
        .join();
  }).join();
  return cores;
}

TEST(CpuTest, RanksKeepToCoresOfTheirOwn) {
  const std::vector<int> all = cores_of({}, {1}, 0);
  const int count = static_cast<int>(all.size());
  const MachineLimits limits{.num_allowed = count};  // whatever quota the test runs with
  const CpuConfig one{.pin = true};
  check_pins(one, count, limits);
  std::set<int> used;
  for (int rank = 0; rank < count; ++rank) {
    const std::vector<int> own = cores_of(one, {count}, rank);
    ASSERT_EQ(own.size(), 1u);
    used.insert(own[0]);
  }
  EXPECT_EQ(used.size(), all.size());
  // Cores are counted from the first rank of this process.
  EXPECT_EQ(cores_of(one, {.world_size = 4, .first = 2, .count = 2}, 2), cores_of(one, {1}, 0));
  // After those of the processes of this host that come before.
  for (int process = 0; process < count; ++process) {
    const LocalRanks ranks{.world_size = count,
                           .first = process,
                           .count = 1,
                           .num_before = process,
                           .num_on_host = count};
    EXPECT_EQ(cores_of(one, ranks, process),
              std::vector<int>{all[static_cast<std::size_t>(process)]});
  }
  const CpuConfig whole{.threads_per_rank = count, .pin = true};
  check_pins(whole, 1, limits);
  EXPECT_EQ(cores_of(whole, {1}, 0), all);
  EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] { check_pins(one, count + 1, limits); }),
                  {"got " + std::to_string(count) + " core", "cpu.pin"}));
  EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] { check_pins(whole, 2, limits); }),
                  {"2 ranks with " + std::to_string(count) + " thread", "cpu.pin"}));
  check_pins({}, 10'000, limits);
  EXPECT_TRUE(has(error_of<engine::DeviceError>([&] { pin_rank(one, {count + 1}, count); }),
                  {"cores for rank " + std::to_string(count), "got " + std::to_string(count)}));
}

TEST(CpuTest, AQuotaCountsAsCoresToPinTo) {
  const MachineLimits limits{.num_cores = 64, .num_allowed = 16, .cpu_quota = 2.5};
  const CpuConfig one{.pin = true};
  check_pins(one, 3, limits);
  EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] { check_pins(one, 4, limits); }),
                  {"4 ranks with 1 thread, got 3 cores", "allows the time of 2.50"}));
  check_pins(one, 16, {.num_cores = 64, .num_allowed = 16, .cpu_quota = 32.0});
}

TEST(CpuWishes, AreWhatTheVariablesSay) {
  const engine::CpuChoice all = CpuWishes::of({{"TESSERA_CPU_ISA", "v4+bf16"},
                                               {"TESSERA_CPU_GEMM", "split-portable"},
                                               {"TESSERA_CPU_THREADS", "3"},
                                               {"TESSERA_CPU", "v2"}})
                                    .choice();
  EXPECT_EQ(all.isa, engine::Isa::kV4Bf16);
  EXPECT_EQ(all.gemm, engine::CpuGemm::kSplitPortable);
  EXPECT_EQ(all.threads_per_product, 3);
  for (const char* nothing : {"", "auto"}) {
    const engine::CpuChoice none = CpuWishes::of({{"TESSERA_CPU_ISA", nothing},
                                                  {"TESSERA_CPU_GEMM", nothing},
                                                  {"TESSERA_CPU_THREADS", nothing}})
                                       .choice();
    EXPECT_FALSE(none.isa || none.gemm || none.threads_per_product);
  }
  const auto error = [](const char* name, const char* value) {
    return error_of<engine::InvalidArgument>([&] {
      static_cast<void>(CpuWishes::of({{name, value}}).choice());
    });
  };
  EXPECT_EQ(error("TESSERA_CPU_ISA", "v5"),
            "[cpu] expected auto, v2, v3, v4, v4+bf16 or v4+amx, got 'v5' (TESSERA_CPU_ISA)");
  EXPECT_EQ(error("TESSERA_CPU_GEMM", "mkl"),
            "[gemm] expected auto, onednn, eigen or split, got 'mkl' (TESSERA_CPU_GEMM)");
  for (const char* threads : {"0", "2x", "-1", "99999999999"}) {
    EXPECT_TRUE(has(error("TESSERA_CPU_THREADS", threads),
                    {"expected a number of threads", threads, "(TESSERA_CPU_THREADS)"}));
  }
}

// In a process of its own, as the choice is made once: says what is chosen.
[[noreturn]] void choose(const CpuConfig& config, bool twice = false, const char* isa = "") {
  setenv("TESSERA_CPU_THREADS", "3", 1);
  if (*isa != 0) setenv("TESSERA_CPU_ISA", isa, 1);
  testing::say_and_exit([&] {
    if (twice) choose_cpu({.gemm = "eigen"});
    choose_cpu(config);
    return cpu_text();
  });
}

TEST(CpuDeathTest, AFlagIsTheChoiceOrAnError) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const ::testing::ExitedWithCode ends(0);
  EXPECT_EXIT(choose({.isa = "v2", .gemm = "eigen"}), ends, "\\[v2, Eigen [0-9.]+\\]");
  EXPECT_EXIT(choose({.isa = "v2", .gemm = "onednn", .threads_per_rank = 2}), ends,
              "\\[v2, oneDNN [0-9.]+ with 2 threads\\]|got none");
  EXPECT_EXIT(
      choose({.gemm = "split"}), ends,
      "\\[v4\\+amx, .*, f32 split\\]|expected a CPU with AMX .* got v|expected Linux to give");
  EXPECT_EXIT(choose({.gemm = "onednn"}, /*twice=*/true), ends,
              "expected to choose before anything is computed, got onednn while eigen is in use "
              "\\(cpu.gemm\\)");
  EXPECT_EXIT(choose({.threads_per_rank = 2}, /*twice=*/true), ends,
              "got 2 while 1 is in use \\(cpu.threads_per_rank\\)");
}

TEST(CpuDeathTest, AnErrorNamesTheFlagOrTheVariableThatAsked) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const ::testing::ExitedWithCode ends(0);
  EXPECT_EXIT(choose({.isa = "v9"}), ends, "got 'v9' \\(cpu.isa\\)");
  EXPECT_EXIT(choose({}, /*twice=*/false, "v9"), ends, "got 'v9' \\(TESSERA_CPU_ISA\\)");
  EXPECT_EXIT(choose({.isa = "v2", .gemm = "split"}), ends,
              "expected a CPU with AMX .* got v2 \\(cpu.gemm\\)");
  EXPECT_EXIT(choose({.gemm = "mkl"}), ends, "got 'mkl' \\(cpu.gemm\\)");
  EXPECT_EXIT(choose({.gemm = "eigen", .threads_per_rank = 3}), ends,
              "got Eigen \\(cpu.threads_per_rank\\)");
}

}  // namespace
}  // namespace tessera::tools
