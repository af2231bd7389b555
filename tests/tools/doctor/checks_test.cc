// What the doctor says of machines that are not this one, and of what is broken.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <filesystem>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "comm/process_group.h"
#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/doctor/wrong_bit.h"
#include "tools/doctor/check.h"
#include "tools/doctor/file_checks.h"
#include "tools/doctor/gpu_checks.h"
#include "tools/doctor/launcher_checks.h"
#include "tools/doctor/machine_checks.h"
#include "tools/doctor/self_test.h"

namespace tessera::tools {
namespace {

using testing::has;
using testing::TempFolder;

constexpr std::int64_t kGiB = std::int64_t{1} << 30;

::testing::AssertionResult is(const Check& check, Verdict verdict,
                              std::initializer_list<std::string_view> parts) {
  const std::string text = text_of(check);
  if (check.verdict != verdict) return ::testing::AssertionFailure() << text;
  if (check.fix.empty() != (verdict == Verdict::kOk)) {
    return ::testing::AssertionFailure() << "a fix belongs to what is not ok, alone: " << text;
  }
  return has(text, parts);
}

TEST(Check, TextHasALineAndAFixForEach) {
  const Checks checks = {
      {.name = "a", .found = "fine"},
      {.name = "b", .verdict = Verdict::kWarn, .found = "slow\x1b[2J", .fix = "wait"},
      {.name = "c", .verdict = Verdict::kFail, .found = "broken", .fix = "mend"}};
  std::string text;
  for (const Check& check : checks) text += text_of(check);
  EXPECT_EQ(text + summary_of(checks),
            "ok    a              fine\n"
            "warn  b              slow\\x1b[2J\n"
            "                     fix: wait\n"
            "FAIL  c              broken\n"
            "                     fix: mend\n"
            "1 ok, 1 warning, 1 failed\n");
  EXPECT_EQ(summary_of({checks[1], checks[0], checks[1]}), "1 ok, 2 warnings, 0 failed\n");
  EXPECT_EQ(verdict_of(checks), Verdict::kFail);
  EXPECT_EQ(verdict_of({checks[0], checks[1]}), Verdict::kWarn);
  EXPECT_EQ(verdict_of({}), Verdict::kOk);
}

TEST(Check, JsonSaysTheSame) {
  const Checks checks = {{.name = "a",
                          .verdict = Verdict::kWarn,
                          .found = "x",
                          .fix = "y",
                          .facts = JsonRecord().add("n", 3)}};
  EXPECT_EQ(testing::parse_json(json_of(checks)),
            testing::parse_json(R"({"verdict":"warn","checks":[{"name":"a","verdict":"warn",
                                      "found":"x","fix":"y","n":3}]})"));
}

TEST(MachineChecks, LimitsOfContainersAreTold) {
  EXPECT_TRUE(
      is(check_cores({.num_cores = 64, .num_allowed = 64}, 4), Verdict::kOk, {"64 usable"}));
  EXPECT_TRUE(is(check_cores({.num_cores = 64, .num_allowed = 4}, 4), Verdict::kOk,
                 {"4 usable; affinity allows 4 of 64"}));
  EXPECT_TRUE(is(check_cores({.num_cores = 64, .num_allowed = 4, .cpu_quota = 8.0}, 4),
                 Verdict::kOk,
                 {"4 usable; affinity allows 4 of 64; a cgroup allows the time of 8"}));
  const MachineLimits roomy{.memory_nbytes = 16 * kGiB, .available_nbytes = 8 * kGiB};
  EXPECT_TRUE(is(check_memory(roomy), Verdict::kOk, {"8.0 GiB free of 16.0 GiB"}));
  MachineLimits tight = roomy;
  tight.cgroup_limit_nbytes = kGiB;
  tight.cgroup_used_nbytes = kGiB - (300 << 20);
  EXPECT_TRUE(is(check_memory(tight), Verdict::kWarn,
                 {"300.0 MiB free", "a cgroup allows 1.0 GiB, and 724.0 MiB of them are used",
                  "--memory_budget=SIZE"}));
  MachineLimits addresses = roomy;
  addresses.address_limit_nbytes = 3 * kGiB;
  EXPECT_TRUE(is(check_memory(addresses), Verdict::kOk, {"ulimit -v allows 3.0 GiB"}));
  // 512 MiB are enough.
  tight.cgroup_used_nbytes = kGiB / 2;
  EXPECT_TRUE(is(check_memory(tight), Verdict::kOk, {"512.0 MiB free"}));
  tight.cgroup_used_nbytes += 1;
  EXPECT_EQ(check_memory(tight).verdict, Verdict::kWarn);
}

// Whatever it is that leaves too few: a quota, a mask, or the machine.
TEST(MachineChecks, TooFewCoresForTheRanksAreTold) {
  const MachineLimits few[] = {{.num_cores = 64, .num_allowed = 64, .cpu_quota = 1.5},
                               {.num_cores = 64, .num_allowed = 2},
                               {.num_cores = 2, .num_allowed = 2}};
  for (const MachineLimits& limits : few) {
    EXPECT_TRUE(is(check_cores(limits, 4), Verdict::kWarn,
                   {"2 usable", "4 ranks, the default, would share them",
                    "fix: try --parallel.ranks=2 --train.accum=2 (same bits)"}));
    EXPECT_TRUE(is(check_cores(limits, 2), Verdict::kOk, {"2 usable"}));
  }
  EXPECT_TRUE(is(check_cores({.num_cores = 64, .num_allowed = 64, .cpu_quota = 0.4}, 4),
                 Verdict::kWarn,
                 {"1 usable; a cgroup allows the time of 0.40",
                  "--parallel.ranks=1 --train.accum=4", "let this process use more cores"}));
  const Check whole = check_cores({.num_cores = 2, .num_allowed = 2}, 4);
  EXPECT_EQ(whole.fix.find("let this process"), std::string::npos) << "there are no more";
  const auto facts = testing::parse_json(json_of(
      {check_cores({.num_cores = 64, .num_allowed = 8, .cpu_quota = 2.5}, 4)}))["checks"][0];
  EXPECT_EQ(facts.at("machine"), 64);
  EXPECT_EQ(facts.at("allowed"), 8);
  EXPECT_EQ(facts.at("usable"), 3);
  EXPECT_EQ(facts.at("quota"), 2.5);
}

TEST(MachineChecks, HugePagesThatAreOffAreTold) {
  const TempFolder root;
  const std::string folder = root / "sys/kernel/mm/transparent_hugepage";
  std::filesystem::create_directories(folder);
  const auto with = [&](const char* text) {
    root.write("sys/kernel/mm/transparent_hugepage/enabled", text);
    return check_huge_pages(root.path());
  };
  EXPECT_TRUE(is(with("[always] madvise never\n"), Verdict::kOk, {"always"}));
  EXPECT_TRUE(is(with("always [madvise] never\n"), Verdict::kOk, {"madvise"}));
  EXPECT_TRUE(is(with("always madvise [never]\n"), Verdict::kWarn,
                 {"never", "echo madvise | sudo tee /sys/"}));
  EXPECT_TRUE(is(with("]nonsense["), Verdict::kOk, {"not told"}));
  EXPECT_TRUE(is(check_huge_pages(root / "none"), Verdict::kOk, {"not told"}));
}

TEST(MachineChecks, LockedMemoryIsComparedWithWhatOffloadTakes) {
  // f32 master, f32 gradient, two f32 moments.
  EXPECT_EQ(offload_nbytes(1000), 16'000);
  constexpr std::int64_t kMany = 1'000'000'000;
  EXPECT_TRUE(is(check_locked_memory(8 << 20, "gpt9", kMany, true), Verdict::kWarn,
                 {"limit 8.0 MiB", "all of gpt9 takes 14.9 GiB (16 B x 1000.0M)", "ulimit -l"}));
  EXPECT_TRUE(is(check_locked_memory(0, "gpt9", kMany, true), Verdict::kWarn, {"limit 0 B"}));
  EXPECT_TRUE(is(check_locked_memory(-1, "gpt9", kMany, true), Verdict::kOk, {"limit none"}));
  EXPECT_TRUE(is(check_locked_memory(16 * kMany, "gpt9", kMany, true), Verdict::kOk, {}));
  EXPECT_TRUE(is(check_locked_memory(16 * kMany - 1, "gpt9", kMany, true), Verdict::kWarn, {}));
  EXPECT_TRUE(is(check_locked_memory(8 << 20, "gpt9", kMany, false), Verdict::kOk,
                 {"on the CPU offload locks nothing"}));
  EXPECT_TRUE(is(check_open_files(256), Verdict::kWarn, {"limit 256", "ulimit -n"}));
  EXPECT_TRUE(is(check_open_files(1024), Verdict::kOk, {}));
  EXPECT_TRUE(is(check_open_files(-1), Verdict::kOk, {"no limit"}));
}

TEST(MachineChecks, TheLimitInForceCountsAndNotHowFarItCanBeRaised) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_CORE, &before), 0);
  rlimit lower = before;
  lower.rlim_cur = 0;
  ASSERT_EQ(setrlimit(RLIMIT_CORE, &lower), 0);
  EXPECT_EQ(soft_limit(RLIMIT_CORE), 0);
  if (before.rlim_max == RLIM_INFINITY) {
    lower.rlim_cur = RLIM_INFINITY;
    ASSERT_EQ(setrlimit(RLIMIT_CORE, &lower), 0);
    EXPECT_EQ(soft_limit(RLIMIT_CORE), -1);
  }
  ASSERT_EQ(setrlimit(RLIMIT_CORE, &before), 0);
}

TEST(GpuChecks, SayWhatABuildCanUse) {
  EXPECT_TRUE(is(check_gpus(nullptr, false), Verdict::kOk, {"built without CUDA"}));
  EXPECT_TRUE(is(check_gpus(nullptr, true), Verdict::kWarn,
                 {"NVIDIA's driver found, but built without", "CUDA Toolkit"}));
  GpuFacts facts{.gpus = {}, .driver_version = 12040, .runtime_version = 13000};
  EXPECT_TRUE(is(check_gpus(&facts, false), Verdict::kOk, {"no GPU found; built with CUDA 13.0"}));
  EXPECT_TRUE(is(check_gpus(&facts, true), Verdict::kWarn, {"CUDA_VISIBLE_DEVICES"}));
  const Gpu hopper{.name = "H100", .memory_nbytes = 80 * kGiB, .major = 9, .minor = 0};
  facts.gpus = {hopper, hopper};
  EXPECT_TRUE(is(check_gpus(&facts, true), Verdict::kOk,
                 {"2: H100 (80.0 GiB, 9.0), H100", "driver for CUDA 12.4, runtime 13.0"}));
  facts.gpus[1] = {.name = "A100", .memory_nbytes = 40 * kGiB, .major = 8, .minor = 0};
  EXPECT_TRUE(is(check_gpus(&facts, true), Verdict::kOk, {"H100", "A100 (40.0 GiB, 8.0)"}));
  facts.gpus[1] = {.name = "V100", .memory_nbytes = 16 * kGiB, .major = 7, .minor = 0};
  EXPECT_TRUE(is(check_gpus(&facts, true), Verdict::kFail, {"V100", "cuda_archs=70"}));
}

TEST(GpuChecks, NcclIsMissedWhereItIsNeeded) {
  for (const std::size_t num_gpus : {0, 1, 4}) {
    EXPECT_TRUE(is(check_nccl("2.28.9", "", num_gpus), Verdict::kOk,
                   {"NCCL 2.28.9 found; used with two or more GPUs"}));
  }
  EXPECT_TRUE(
      is(check_nccl("", "why", 1), Verdict::kOk, {"no NCCL found; used with two or more GPUs"}));
  EXPECT_TRUE(is(check_nccl("", "why", 2), Verdict::kWarn,
                 {"no NCCL found for 2 GPUs: why", "--parallel.backend=threads"}));
}

TEST(LauncherChecks, SayWhatIsHeeded) {
  const auto one = [](const std::string& name, const std::string& value) {
    const Checks checks = check_launcher({{name, value}, {"PATH", "/bin"}});
    EXPECT_EQ(checks.size(), 1u) << name;
    return checks.at(0);
  };
  EXPECT_TRUE(is(one("HOME", "x"), Verdict::kOk, {"no launcher has set any"}));
  EXPECT_TRUE(is(one("NCCL_DEBUG", "INFO"), Verdict::kOk, {"NCCL_DEBUG=INFO: heeded"}));
  EXPECT_TRUE(is(
      one("NCCL_COMM_ID", "h1:1"), Verdict::kWarn,
      {"NCCL_COMM_ID=h1:1: not heeded (trainers over NCCL refuse it", "fix: unset NCCL_COMM_ID"}));
  EXPECT_TRUE(is(one("CUDA_VISIBLE_DEVICES", "1"), Verdict::kOk, {"heeded"}));
  EXPECT_TRUE(is(one("OMP_NUM_THREADS", "1"), Verdict::kOk, {"not heeded"}));
  EXPECT_TRUE(is(one("OMP_NUM_THREADS", "2"), Verdict::kWarn, {"--cpu.threads_per_rank=2"}));
}

// As find_launch() decides.
TEST(LauncherChecks, WhatNoLauncherHasSetIsNotHeeded) {
  const Checks alone = check_launcher({{"LOCAL_RANK", "3"}});
  ASSERT_EQ(alone.size(), 2u);
  EXPECT_TRUE(is(alone[0], Verdict::kOk, {"launcher", "LOCAL_RANK=3 not heeded, as nothing else"}));
  EXPECT_TRUE(is(alone[1], Verdict::kOk,
                 {"LOCAL_RANK=3: not heeded (no launcher has started this process"}));
  EXPECT_TRUE(is(check_launcher({{"MASTER_ADDR", "h1"}}).at(0), Verdict::kOk,
                 {"MASTER_ADDR=h1: not heeded"}));
}

TEST(LauncherChecks, SayWhoHasStartedThisProcess) {
  const auto checks = [](const std::string& num_processes) {
    return check_launcher({{"RANK", "0"},
                           {"WORLD_SIZE", num_processes},
                           {"MASTER_ADDR", "h1"},
                           {"MASTER_PORT", "29500"}});
  };
  EXPECT_TRUE(is(checks("4").at(0), Verdict::kOk, {"launcher", "env, process 0 of 4"}));
  EXPECT_EQ(checks("4").size(), 5u);
  EXPECT_TRUE(is(checks("4").at(1), Verdict::kOk, {"MASTER_ADDR=h1: heeded"}));
  EXPECT_TRUE(is(checks("1").at(0), Verdict::kOk, {"env, process 0 of 1"}));
  EXPECT_TRUE(is(checks("many").at(0), Verdict::kWarn, {"got WORLD_SIZE=many", "fix: unset"}));
  EXPECT_TRUE(is(check_launcher({{"SLURM_JOB_ID", "7"}}).at(0), Verdict::kOk,
                 {"in a Slurm job (SLURM_JOB_ID=7), but not started by srun"}));
}

TEST(LauncherChecks, ANameOfOursThatNothingReadsIsASlip) {
  const Checks checks = check_launcher({{"TESSERA_CPU_TREADS", "4"}, {"TESSERA_CPU_ISA", "v3"}});
  ASSERT_EQ(checks.size(), 2u);
  EXPECT_TRUE(is(checks[0], Verdict::kOk, {"TESSERA_CPU_ISA=v3: heeded"}));
  EXPECT_TRUE(is(checks[1], Verdict::kWarn,
                 {"TESSERA_CPU_TREADS is set, and nothing reads it",
                  "fix: unset TESSERA_CPU_TREADS; did you mean TESSERA_CPU_THREADS?"}));
  EXPECT_TRUE(
      is(check_launcher({{"TESSERA_X", ""}}).at(0), Verdict::kWarn, {"fix: unset TESSERA_X\n"}));
}

TEST(FileChecks, TheTextIsReadAsTrainingsReadIt) {
  const TempFolder folder;
  EXPECT_TRUE(is(check_text(folder.write("a.txt", "In the beginning")), Verdict::kOk,
                 {"a.txt: text, 16 tokens"}));
  EXPECT_TRUE(is(check_text(folder / "none"), Verdict::kFail, {"none", "--data.path"}));
  EXPECT_TRUE(is(check_text(folder.write("half.bin", "123")), Verdict::kFail, {"half.bin"}));
}

TEST(FileChecks, WhatIsMissingIsGotByWhatTheFixSays) {
  EXPECT_TRUE(is(check_text(""), Verdict::kFail,
                 {"bazel run", "--data.path=FILE", "apt-get install bible-kjv && bible -f"}));
  EXPECT_TRUE(is(check_images(""), Verdict::kFail,
                 {"bazel run", "--data.path=FOLDER", "apt-get install dataset-fashion-mnist"}));
  const TempFolder folder;
  EXPECT_TRUE(is(check_images(folder / "none"), Verdict::kFail, {"none", "--data.path"}));
  for (const Check& check : {check_text(""), check_images("")}) {
    EXPECT_EQ(check.found.find("apt-get"), std::string::npos) << "said once: " << check.found;
  }
  // What is there and is not read needs no other text from a package.
  const Check packed = check_text(folder.write("a.gz", "\x1f\x8b\x08"));
  EXPECT_TRUE(is(packed, Verdict::kFail, {"a gzip file", "gunzip", "docs/data.md"}));
  EXPECT_EQ(packed.fix.find("apt-get"), std::string::npos) << packed.fix;
  EXPECT_EQ(check_images(folder / "none").fix.find("apt-get"), std::string::npos);
}

TEST(FileChecks, AnOutputFolderIsTriedAndLeftAlone) {
  const TempFolder folder;
  EXPECT_TRUE(is(check_out(folder / "runs/new", 1), Verdict::kOk, {"can be written to", " free"}));
  EXPECT_EQ(folder.num_entries(), 0);
  EXPECT_TRUE(is(check_out(folder.path(), std::int64_t{1} << 62), Verdict::kWarn, {"make room"}));
  EXPECT_TRUE(
      is(check_out(folder.write("file", "") + "/runs", 1), Verdict::kFail, {"file", "--out"}));
  EXPECT_TRUE(is(check_out("/proc/tessera", 1), Verdict::kFail, {"/proc"}));
  EXPECT_TRUE(is(check_out(folder / "new/" + std::string(255, 'n'), 1), Verdict::kOk, {"free"}));
  EXPECT_TRUE(is(check_out(folder / "new/" + std::string(256, 'n'), 1), Verdict::kFail,
                 {"names of at most 255 bytes", "--out"}));
}

TEST(SelfTest, AWrongElementOfAProductFails) {
  EXPECT_EQ(check_product(engine_product()).verdict == Verdict::kFail, false);
  for (const float error : {1e-2f, std::nanf("")}) {
    const Check check =
        check_product([&](engine::MatrixView<const float> a, engine::MatrixView<const float> b,
                          engine::MatrixView<float> c) {
          engine_product()(a, b, c);
          c.data[c.ld * 192 + 128] += error;  // the last one
        });
    EXPECT_TRUE(is(check, Verdict::kFail, {"element (192, 128)"}));
  }
}

TEST(SelfTest, AWrongElementOfACollectiveFails) {
  using Op = comm::Collective::Op;
  for (const Op op : {Op::kAllGather, Op::kReduceScatter}) {
    const Checks checks = check_collectives(2, with_wrong_bit(op));
    ASSERT_EQ(checks.size(), 2u);
    const bool gathers = op == Op::kAllGather;
    EXPECT_TRUE(is(checks[gathers ? 0 : 1], Verdict::kFail, {"wrong values: element", "is "}));
    EXPECT_NE(checks[gathers ? 1 : 0].verdict, Verdict::kFail);
  }
}

TEST(SelfTest, GpusAreComparedWithEachOtherAndWithTheirOwnCopies) {
  const GpuRates good{.f32_gflop_per_s = 50e3,
                      .bf16_gflop_per_s = 600e3,
                      .copy_gb_per_s = 2500,
                      .add_gb_per_s = 2600,
                      .pinned_gb_per_s = 50};
  EXPECT_TRUE(check_gpu_products({}).empty());
  const auto check = [&](const GpuRates& second, const std::string& wrong = "") {
    const Checks checks = check_gpu_products({{.gpu = 0, .rates = good, .host_gb_per_s = 190},
                                              {.gpu = 1, .wrong = wrong, .rates = second}});
    EXPECT_EQ(checks.size(), 2u);
    EXPECT_TRUE(is(checks[0], Verdict::kOk,
                   {"values right", "50.0 TFLOP/s", "2500 GB/s",
                    "for plan in bf16: --rates.gflops=600000 --rates.memory_gbs=2500 "
                    "--rates.host_link_gbs=50 --rates.host_memory_gbs=190"}));
    EXPECT_EQ(checks[1].name, "gpu 1");
    return checks[1];
  };
  const auto with = [&](double GpuRates::*rate, double value) {
    GpuRates rates = good;
    rates.*rate = value;
    return rates;
  };
  EXPECT_EQ(check(good).verdict, Verdict::kOk);
  EXPECT_TRUE(is(check({}, " element (1, 2)"), Verdict::kFail,
                 {"wrong values: element (1, 2)", "CUDA_VISIBLE_DEVICES without 1"}));
  for (const auto rate : {&GpuRates::f32_gflop_per_s, &GpuRates::bf16_gflop_per_s}) {
    EXPECT_TRUE(is(check(with(rate, 0.7 * (good.*rate))), Verdict::kWarn, {"another GPU"}));
  }
  EXPECT_TRUE(is(check(with(&GpuRates::copy_gb_per_s, 1800)), Verdict::kWarn, {"another GPU"}));
  EXPECT_TRUE(is(check(with(&GpuRates::pinned_gb_per_s, 3)), Verdict::kWarn, {"PCIe"}));
  // Alone.
  const auto alone = [&](const GpuRates& rates) {
    return check_gpu_products({{.gpu = 0, .rates = rates}}).at(0);
  };
  EXPECT_TRUE(
      is(alone(with(&GpuRates::bf16_gflop_per_s, 50e3)), Verdict::kWarn, {"bf16 next to f32"}));
  EXPECT_TRUE(is(alone(with(&GpuRates::copy_gb_per_s, 20e3)), Verdict::kWarn, {"next to copies"}));
}

TEST(SelfTest, CollectivesAreRightHere) {
  for (const int ranks : {2, 3}) {
    for (const Check& check : check_collectives(ranks)) {
      EXPECT_NE(check.verdict, Verdict::kFail) << check.found;
      EXPECT_TRUE(has(check.found, {"values right"}));
    }
  }
}

}  // namespace
}  // namespace tessera::tools
