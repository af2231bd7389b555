// Raw use, and memory of a caller's own: the bits of the tape's steps, for every strategy.
#include "shard/raw.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/copy.h"
#include "shard/optimizer/sgd.h"
#include "tests/shard/collective_log.h"
#include "tests/shard/toy_model.h"
#include "tests/testing/errors.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::InvalidArgument;
using engine::Memory;
using engine::Parameter;
using engine::Stream;
using engine::Tape;
using engine::Tensor;
using tessera::testing::affine;
using tessera::testing::CollectiveLog;
using tessera::testing::error_of;
using tessera::testing::has;
using tessera::testing::LoggedGroup;
using tessera::testing::sum;
using tessera::testing::ToyModel;

constexpr std::int64_t kNumel = 300;
using Vector = std::vector<float>;

// What it gave out, and what came back.
class Pool {
 public:
  engine::Allocator allocator() {
    return {.allocate = [this](std::int64_t nbytes) -> void* {
              const std::lock_guard lock(mutex_);
              if (total_ + nbytes > limit) return nullptr;
              total_ += nbytes;
              void* data = std::aligned_alloc(256, static_cast<std::size_t>(nbytes));
              blocks_[data] = nbytes;
              return data;
            },
            .free =
                [this](void* data, std::int64_t nbytes) {
                  const std::lock_guard lock(mutex_);
                  EXPECT_EQ(blocks_.at(data), nbytes);
                  blocks_.erase(data);
                  total_ -= nbytes;
                  std::free(data);
                }};
  }
  bool holds(const void* data) {
    const std::lock_guard lock(mutex_);
    auto it = blocks_.upper_bound(const_cast<void*>(data));
    if (it == blocks_.begin()) return false;
    --it;
    return data < static_cast<const char*>(it->first) + it->second;
  }
  std::int64_t total() const { return total_; }
  std::int64_t limit = std::int64_t{1} << 40;

 private:
  std::mutex mutex_;
  std::int64_t total_ = 0;
  std::map<void*, std::int64_t> blocks_;
};

Vector batch(int number) {
  const engine::RandomStream random{7, static_cast<std::uint64_t>(number)};
  Vector x(kNumel);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = random.normal(i);
  return x;
}

// The toy model's forward and backward by hand. Layer 1 is frozen, and runs twice.
const std::vector<std::size_t> kOrder = {0, 1, 2, 1};

void pass(Raw& raw, ToyModel& model, Vector x, Pool& pool) {
  std::vector<Vector> saved;
  const auto forward = [&](Parameter& w, Parameter* b) {
    EXPECT_TRUE(pool.holds(w.value.raw())) << w.name;
    saved.push_back(x);
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = w.value.data<float>()[i] * x[i] + (b == nullptr ? 0.0f : b->value.data<float>()[i]);
    }
  };
  raw.gather(model.root, Raw::For::kForward);
  forward(model.scale, nullptr);
  for (const std::size_t i : kOrder) {
    auto& l = *model.layers[i];
    raw.gather(l.block, Raw::For::kForward);
    forward(l.weight, &l.bias);
    raw.release(l.block);
  }
  forward(model.scale, nullptr);
  raw.release(model.root);
  Vector d(x.size(), 1.0f);  // of the sum
  const auto add = [&](Parameter& p, const Vector* factor) {
    const engine::GradTarget grad = raw.grad(p);
    if (!grad) return;
    EXPECT_TRUE(pool.holds(grad.dst.raw())) << p.name;
    for (std::size_t i = 0; i < d.size(); ++i) {
      float& g = grad.dst.data<float>()[i];
      g = (grad.accumulate ? g : 0.0f) + d[i] * (factor == nullptr ? 1.0f : (*factor)[i]);
    }
  };
  const auto backward = [&](Parameter& w, Parameter* b) {
    add(w, &saved.back());
    if (b != nullptr) add(*b, nullptr);
    for (std::size_t i = 0; i < d.size(); ++i) d[i] *= w.value.data<float>()[i];
    saved.pop_back();
  };
  raw.gather(model.root, Raw::For::kBackward);
  backward(model.scale, nullptr);
  for (auto i = kOrder.rbegin(); i != kOrder.rend(); ++i) {
    auto& l = *model.layers[*i];
    raw.gather(l.block, Raw::For::kBackward);
    backward(l.weight, &l.bias);
    raw.grad_ready(l.block);
  }
  backward(model.scale, nullptr);
  raw.grad_ready(model.root);
}

Tensor loss_of(Tape& tape, ToyModel& model, const Tensor& input) {
  return tape.region(model.root, [&] {
    Tensor x = affine(tape, input, model.scale, nullptr);
    for (const std::size_t i : kOrder) {
      auto& l = *model.layers[i];
      x = tape.region(l.block, [&] { return affine(tape, x, l.weight, &l.bias); });
    }
    return sum(tape, affine(tape, x, model.scale, nullptr));
  });
}

struct Result {
  Vector values;
  std::vector<std::string> lines;  // what the last step sent
};

Result train(bool is_raw, int ranks, int accum, const FsdpOptions& options) {
  Result result;
  comm::run_ranks(ranks, {}, [&](ProcessGroup& world) {
    Pool pool;
    {
      CollectiveLog log;
      LoggedGroup group(world, log);
      const Memory memory({.poison = true, .allocator = pool.allocator()});
      const Stream compute = Stream::inline_cpu("compute");
      ToyModel model(3, kNumel);
      model.layers[1]->weight.trainable = model.layers[1]->bias.trainable = false;
      Fsdp fsdp(group, memory, compute, model.blocks(), &model.root, options);
      Sgd optimizer(fsdp, {.momentum = 0.9});
      Raw raw(fsdp);
      Tape tape(memory, compute);
      Vector mine;
      for (int step = 0; step < 3; ++step) {
        log.take();
        for (int micro = 0; micro < accum; ++micro) {
          micro == 0 ? fsdp.begin_step(accum) : fsdp.next_micro_step();
          const Vector x = batch((step * accum + micro) * ranks + world.rank());
          if (is_raw) {
            pass(raw, model, x, pool);
          } else {
            tape.backward(loss_of(tape, model, Tensor::from<float>(memory, {kNumel}, x)));
          }
        }
        mine.push_back(raw.step(optimizer, 1e-3, /*max_norm=*/5).value());
      }
      if (world.rank() == 0) result.lines = log.take();
      // An evaluation, with what was updated.
      auto& l = *model.layers[2];
      raw.gather(l.block, Raw::For::kEvaluation);
      mine.insert(mine.end(), l.weight.value.data<float>(), l.weight.value.data<float>() + kNumel);
      raw.release(l.block);
      EXPECT_EQ(Vector(mine.end() - kNumel, mine.end()), fsdp.full_parameter(l.weight));
      for (const Parameter* p : fsdp.parameters()) {
        for (const float v : fsdp.full_parameter(*p)) mine.push_back(v);
      }
      if (world.rank() == 0) result.values = mine;
    }
    EXPECT_EQ(pool.total(), 0) << "all of it was given back";
  });
  return result;
}

TEST(Raw, HasTheBitsAndTheCallsOfTheTape) {
  const Result expected = train(false, 1, 6, {.placement = Placement::preset("ddp")});
  for (const char* strategy : {"zero3", "shard_grad_op", "zero1", "ddp"}) {
    for (const int ranks : {1, 2, 3}) {
      for (const int packing : {0, 500, 100000}) {
        const FsdpOptions options{.placement = Placement::preset(strategy),
                                  .unit_min_numel = packing};
        const Result raw = train(true, ranks, 6 / ranks, options);
        EXPECT_EQ(raw.values, expected.values) << strategy << " ranks " << ranks;
        EXPECT_EQ(raw.lines, train(false, ranks, 6 / ranks, options).lines) << strategy;
      }
    }
  }
}

TEST(Raw, RefusesWhatIsOutOfOrder) {
  comm::run_ranks(1, {}, [](ProcessGroup& world) {
    ToyModel model(1, kNumel), stranger(1, kNumel);
    Fsdp fsdp(world, Memory(), Stream::inline_cpu("compute"), model.blocks(), nullptr, {});
    Raw raw(fsdp);
    const auto& block = model.layers[0]->block;
    EXPECT_TRUE(has(error_of<InvalidArgument>(
                        [&] { raw.gather(stranger.layers[0]->block, Raw::For::kForward); }),
                    {"[raw]", "wrapped", "h.0"}));
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] { raw.gather(block, Raw::For::kBackward); }),
                    {"begin_step()", "h.0"}));
    fsdp.begin_step();
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] { raw.gather(block, Raw::For::kBackward); }),
                    {"expected a forward", "h.0"}));
    raw.gather(block, Raw::For::kForward);
    raw.release(block);
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] { fsdp.finish_step(); }),
                    {"a backward for every recorded forward", "h.0"}));
  });
}

TEST(Allocator, ThatHasNoMoreEndsInAnErrorThatSaysSo) {
  Pool pool;
  pool.limit = 1000;
  const Memory memory({.allocator = pool.allocator()});
  EXPECT_TRUE(has(error_of<engine::DeviceError>(
                      [&] { Tensor::empty(memory, {1000}, engine::DType::kF32, "big"); }),
                  {"expected 4000 bytes"}));
  EXPECT_TRUE(has(error_of<InvalidArgument>(
                      [&] { Memory({.allocator = {.allocate = pool.allocator().allocate}}); }),
                  {"both"}));
}

}  // namespace
}  // namespace tessera::shard
