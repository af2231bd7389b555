// Sharding without the tape, in memory of one's own: forward and backward by hand, with parameters,
// gradients and slots in a pool that this program has. The task: the distance of two numbers.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "comm/threads.h"
#include "shard/optimizer/sgd.h"
#include "shard/raw.h"

namespace comm = tessera::comm;
namespace engine = tessera::engine;
namespace shard = tessera::shard;
using shard::Raw;

// Blocks are pieces of one array, and are given back with it.
class Pool {
 public:
  engine::Allocator allocator() {
    return {.allocate = [this](std::int64_t nbytes) { return take(std::size_t(nbytes)); },
            .free = [](void*, std::int64_t) {}};
  }
  std::size_t used() const { return used_; }

 private:
  void* take(std::size_t nbytes) {
    const std::size_t begin = (used_ + 255) / 256 * 256;
    if (begin + nbytes > sizeof(data_)) return nullptr;
    used_ = begin + nbytes;
    return data_ + begin;
  }
  std::size_t used_ = 0;
  alignas(256) char data_[1 << 16];
};

constexpr std::size_t kHidden = 16, kBatch = 32;

float train(comm::ProcessGroup& world) {
  Pool pool;
  const engine::Memory memory({.allocator = pool.allocator()});
  engine::Parameter w1{"w1", {2, kHidden}, engine::Init::normal(1)};
  engine::Parameter w2{"w2", {kHidden}, engine::Init::normal(0.3f)};
  engine::Block first{"first", {&w1}}, second{"second", {&w2}};
  shard::Fsdp fsdp(world, memory, engine::Stream::inline_cpu("compute"), {&first, &second}, nullptr,
                   {.placement = shard::Placement::preset("zero3")});
  shard::Sgd sgd(fsdp, {.momentum = 0.9});
  Raw raw(fsdp);
  std::array<std::array<float, 2>, kBatch> x{};
  std::array<std::array<float, kHidden>, kBatch> h{};
  std::array<float, kBatch> dy{};
  float loss = 0;
  for (std::uint64_t step = 0; step < 500; ++step) {
    const engine::RandomStream random{step, std::uint64_t(world.rank())};
    fsdp.begin_step();
    raw.gather(first, Raw::For::kForward);  // h = relu(x w1)
    for (std::size_t b = 0; b < kBatch; ++b) {
      x[b] = {random.uniform(2 * b), random.uniform(2 * b + 1)};
      const float* w = w1.value.data<float>();
      for (std::size_t j = 0; j < kHidden; ++j)
        h[b][j] = std::max(0.0f, x[b][0] * w[j] + x[b][1] * w[kHidden + j]);
    }
    raw.release(first);
    raw.gather(second, Raw::For::kForward);  // loss = mean (h w2 - |x0 - x1|)^2
    loss = 0;
    for (std::size_t b = 0; b < kBatch; ++b) {
      float error = -std::abs(x[b][0] - x[b][1]);
      for (std::size_t j = 0; j < kHidden; ++j) error += h[b][j] * w2.value.data<float>()[j];
      dy[b] = 2 * error / kBatch;
      loss += error * error / kBatch;
    }
    raw.release(second);
    raw.gather(second, Raw::For::kBackward);  // dw2 = h^T dy; dh = dy w2, into h
    float* dw2 = raw.grad(w2).dst.data<float>();
    std::fill_n(dw2, kHidden, 0.0f);
    for (std::size_t b = 0; b < kBatch; ++b) {
      for (std::size_t j = 0; j < kHidden; ++j) {
        dw2[j] += h[b][j] * dy[b];
        h[b][j] = h[b][j] > 0 ? dy[b] * w2.value.data<float>()[j] : 0;
      }
    }
    raw.grad_ready(second);                  // it is reduced while what follows runs
    raw.gather(first, Raw::For::kBackward);  // dw1 = x^T dh
    float* dw1 = raw.grad(w1).dst.data<float>();
    std::fill_n(dw1, 2 * kHidden, 0.0f);
    for (std::size_t b = 0; b < kBatch; ++b)
      for (std::size_t i = 0; i < 2 * kHidden; ++i) dw1[i] += x[b][i / kHidden] * h[b][i % kHidden];
    raw.grad_ready(first);
    raw.step(sgd, /*lr=*/0.05, /*max_norm=*/1);
  }
  if (world.rank() == 0) std::printf("loss %.5f in %zu bytes of the pool\n", loss, pool.used());
  return loss;
}

int main() {
  comm::run_ranks(4, {}, [](comm::ProcessGroup& world) {
    engine::require(train(world) < 1e-3f, "[embed_raw] expected it to learn");
  });
}
