// A process takes nothing of GPUs that it was not told to use: a context of each costs some hundred
// MB, on GPUs that belong to other ranks.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <functional>
#include <thread>
#include <vector>

#include "comm/nccl.h"
#include "comm/threads.h"
#include "engine/copy.h"
#include "engine/stream.h"
#include "tests/emulator/control.h"
#include "tests/shard/toy_training.h"

namespace tessera::cuda_emulation {
namespace {

using engine::Memory;
using engine::Stream;
using engine::Tensor;
using Gpus = std::vector<int>;

// The devices with a context after fn() in a new thread, and what is left of it has gone.
Gpus contexts_of(const std::function<void()>& fn) {
  reset();
  std::thread(fn).join();
  return contexts();
}

TEST(ContextsTest, AreOfTheStreamsGpuAlone) {
  EXPECT_EQ(contexts_of([] {
              const Stream compute = Stream::cuda("compute", 1);
              const Memory memory(compute), pinned = Memory::pinned(compute);
              const Tensor x = Tensor::zeros(memory, {8}, engine::DType::kF32);
              const Tensor y = Tensor::empty(pinned, {8}, engine::DType::kF32);
              engine::copy(y, x, compute);
              const engine::Event copied = compute.record("copied");
              std::thread([copied] { copied.wait(); }).join();
              const Stream host = compute.host_worker("host");
              host.wait(copied);
              host.launch({.name = "nothing"}, [] {});
              compute.wait(host.record("done"));
              compute.synchronize();
            }),
            Gpus{1});
}

TEST(ContextsTest, LastHandlesMayGoInAnyThread) {
  Memory memory;
  engine::Event event;
  Tensor x;
  EXPECT_EQ(contexts_of([&] {
              const Stream compute = Stream::cuda("compute", 1);
              memory = Memory(compute);
              x = Tensor::zeros(memory, {8}, engine::DType::kF32);
              event = compute.record("written");
            }),
            Gpus{1});
  std::thread([&] { EXPECT_TRUE((event.wait(), event.reached())); }).join();
  event = {}, x = {}, memory = Memory();
  EXPECT_EQ(contexts(), Gpus{1});
}

TEST(ContextsTest, AThreadThatUsesAnotherGpuKeepsIt) {
  EXPECT_EQ(contexts_of([] {
              int device = -1;
              cudaSetDevice(2);
              { const Stream compute = Stream::cuda("compute", 1); }
              EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
              EXPECT_EQ(device, 2);
            }),
            (Gpus{1, 2}));
}

constexpr int kRanks = 2;
const Gpus kGpus = {1, 2};

testing::Training toy_training() {
  return {.ranks = kRanks, .steps = 2, .num_gpus = kRanks, .first_gpu = kGpus[0]};
}

TEST(ContextsTest, AreOfTheGpusOfNcclsRanks) {
  EXPECT_EQ(contexts_of([&] {
              comm::run_nccl_ranks(kRanks, {.gpus = kGpus}, [&](comm::ProcessGroup& world) {
                testing::train_rank(world, toy_training());
              });
            }),
            kGpus);
}

TEST(ContextsTest, AreOfTheGpusOfThreadRanks) {
  EXPECT_EQ(contexts_of([&] { testing::train(toy_training()); }), kGpus);
}

}  // namespace
}  // namespace tessera::cuda_emulation
