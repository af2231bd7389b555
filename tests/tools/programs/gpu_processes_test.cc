// Trainings whose ranks are processes, or threads of several, with a GPU each, emulated: they have
// the numbers of those whose ranks are threads of one, multiply as rank 0 chooses, and end when one
// of them is lost.
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "tests/testing/errors.h"
#include "tests/testing/program.h"
#include "tests/tools/programs/lost_process_suite.h"
#include "tests/tools/testing/process_training.h"

namespace tessera {
namespace {

using testing::Flags;
using testing::has;
using testing::Own;

class GpuProcesses : public testing::ProcessTraining {
 protected:
  GpuProcesses() {
    flags_["device"] = "cuda";
    flags_["parallel.canonical"] = "true";
  }
  static Own with_devices(int count) {
    return {.environment = {{"CUDA_EMULATION", "devices=" + std::to_string(count)}}};
  }
};

TEST_F(GpuProcesses, HaveTheBitsOfThreads) {
  for (const char* strategy : {"zero3", "ddp"}) {
    const Flags more = {{"parallel.strategy", strategy}};
    auto all = start(2, more).wait();
    const std::string bits = sha256_of(all);
    EXPECT_TRUE(has(all[0].out, {"device: cuda, 2 ranks on 2 GPUs, nccl\n",
                                 "\ntorchrun: 1 host x 2 processes x 1 thread, transport nccl\n"}));
    EXPECT_TRUE(has(all[0].out, {"matrix products: "}));
    // The folder keeps what rank 0 has chosen.
    Flags again = more;
    again["cuda.gemm_algorithms"] = folder_ / "run/gemm_algorithms.txt";
    EXPECT_EQ(of_threads(2, again), bits) << strategy;
    EXPECT_NE(bits, "");
  }
}

// Which see all GPUs, or their own ones alone.
TEST_F(GpuProcesses, WithTwoThreadsEachHaveTheBitsOfThreads) {
  for (const bool on_hosts : {false, true}) {
    std::map<int, Own> own;
    for (int p = 0; p < 2 && on_hosts; ++p) {
      own[p] = {.environment = {{"CUDA_EMULATION", "devices=2,host=" + std::to_string(p)}}};
    }
    Flags more = {{"parallel.strategy", on_hosts ? "hsdp" : "zero3"}};
    Flags again = more;
    more["parallel.threads"] = "2";
    auto all = start(2, more, own).wait();
    EXPECT_TRUE(has(all[0].out, {"device: cuda, 4 ranks on 4 GPUs, nccl\n",
                                 "\ntorchrun: 1 host x 2 processes x 2 threads, transport nccl\n",
                                 on_hosts ? "replicas of 2, one per process" : ""}));
    again["cuda.gemm_algorithms"] = folder_ / "run/gemm_algorithms.txt";
    EXPECT_EQ(sha256_of(all), of_threads(4, again));
  }
}

TEST_F(GpuProcesses, TakeTheGpuOfTheirNumberOrTheOnlyOne) {
  auto few = start(3, {}, {{0, with_devices(2)}, {1, with_devices(2)}, {2, with_devices(2)}});
  for (const auto& outcome : few.wait()) {
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(has(outcome.err, {"[launch] expected a GPU for each of 3 processes on this host, "
                                  "got 2 (device=cpu keeps to the CPU; torchrun, process "}));
  }
  const Flags threads = {{"parallel.threads", "2"}};
  for (const auto& outcome :
       start(2, threads, {{0, with_devices(3)}, {1, with_devices(3)}}).wait()) {
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(has(outcome.err, {"expected a GPU for each of 4 ranks on this host, got 3 ("}));
  }
  // Which NCCL finds out: two processes that see one GPU may see two different ones.
  for (const auto& outcome : start(2, {}, {{0, with_devices(1)}, {1, with_devices(1)}}).wait()) {
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(has(outcome.err, {"NCCL wants a GPU for each rank"}));
  }
}

TEST_F(GpuProcesses, WhatTheyCannotDoIsRefused) {
  const struct {
    Flags flags;
    testing::Environment environment;
    std::string says;
  } cases[] = {
      {{{"parallel.transport", "gloo"}},
       {},
       "expected parallel.transport=nccl between GPUs, got gloo"},
      {{}, {{"NCCL_COMM_ID", "h1:1234"}}, "expected NCCL_COMM_ID unset"},
  };
  for (const auto& c : cases) {
    const Own own{.environment = c.environment};
    for (const auto& outcome : start(2, c.flags, {{0, own}, {1, own}}).wait()) {
      EXPECT_EQ(outcome.exit_code, 1);
      EXPECT_TRUE(has(outcome.err, {"error: ", c.says}));
    }
  }
}

using testing::LostProcessTest;
using testing::StoppedProcessTest;

const testing::JobKind kProcesses = {.name = "nccl",
                                     .flags = {{"device", "cuda"}, {"parallel.canonical", "true"}}};
const testing::JobKind kPairs = {
    .name = "nccl_and_threads",
    .num_processes = 2,
    .flags = {{"device", "cuda"}, {"parallel.canonical", "true"}, {"parallel.threads", "2"}}};
INSTANTIATE_TEST_SUITE_P(Jobs, LostProcessTest, ::testing::Values(kProcesses, kPairs),
                         testing::kind_name);
INSTANTIATE_TEST_SUITE_P(Jobs, StoppedProcessTest, ::testing::Values(kProcesses),
                         testing::kind_name);

}  // namespace
}  // namespace tessera
