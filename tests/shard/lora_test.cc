// Low-rank adapters (Hu et al., "LoRA", arXiv:2106.09685) of a frozen base: what they cost, by
// formula, and that they train as in one process.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/copy.h"
#include "ops/add.h"
#include "ops/cross_entropy.h"
#include "ops/linear.h"
#include "ops/relu.h"
#include "ops/scale.h"
#include "shard/hooks/hooks.h"
#include "shard/optimizer/adamw.h"
#include "shard/optimizer/sgd.h"
#include "shard/summon.h"
#include "tests/shard/collective_log.h"
#include "tests/testing/sanitizers.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::Block;
using engine::Category;
using engine::DType;
using engine::Init;
using engine::Memory;
using engine::Parameter;
using engine::Stream;
using engine::Tape;
using engine::Tensor;
using tessera::testing::CollectiveLog;
using tessera::testing::LoggedGroup;

constexpr int kLayers = 5, kLowest = 2;  // layers from kLowest on have an adapter
constexpr std::int64_t kWidth = 64, kRank = 4, kRows = 8;
constexpr std::int64_t kBase = kWidth * kWidth, kAdapter = 2 * kWidth * kRank;

// h = relu(h W + 2 (h A) B), W frozen.
class Model {
 public:
  explicit Model(int lowest = kLowest) {
    for (int i = 0; i < kLayers; ++i) {
      layers.push_back(std::make_unique<Layer>("h." + std::to_string(i), i >= lowest));
    }
  }

  std::vector<Block*> blocks() {
    std::vector<Block*> all;
    for (auto& l : layers) all.push_back(&l->block);
    return all;
  }

  Tensor loss(Tape& tape, Tensor h, const Tensor& targets, bool recompute = false) {
    for (auto& layer : layers) {
      Layer& l = *layer;
      h = tape.region(l.block,
                      [h, &tape, &l] {
                        const Tensor base = ops::linear(tape, h, l.weight, nullptr);
                        if (!l.has_adapter) return ops::relu(tape, base);
                        const Tensor low =
                            ops::linear(tape, ops::linear(tape, h, l.a, nullptr), l.b, nullptr);
                        return ops::relu(tape, ops::add(tape, base, ops::scale(tape, low, 2)));
                      },
                      {.recompute = recompute});
    }
    return ops::cross_entropy(tape, h, targets);
  }

  struct Layer {
    Layer(const std::string& name, bool adapted)
        : weight{name + ".w", {kWidth, kWidth}, Init::normal(0.1f), /*trainable=*/false},
          a{name + ".a", {kWidth, kRank}, Init::normal(0.1f)},
          b{name + ".b", {kRank, kWidth}, Init::normal(0.1f)},
          has_adapter(adapted),
          block{name, {&weight}} {
      if (adapted) block.parameters.insert(block.parameters.end(), {&a, &b});
    }

    Parameter weight, a, b;
    bool has_adapter;
    Block block;
  };
  std::vector<std::unique_ptr<Layer>> layers;
};

// Adds up what each kind of launch says of itself.
class Flops : public engine::LaunchListener {
 public:
  void on_launch(const engine::LaunchRecord& record) noexcept override {
    const std::lock_guard lock(mutex_);
    flops_[std::string(record.work.name)] += record.work.flops;
  }
  std::map<std::string, double> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(flops_, {});
  }

 private:
  std::mutex mutex_;
  std::map<std::string, double> flops_;
};

struct Rank {
  explicit Rank(ProcessGroup& world, const FsdpOptions& options, engine::LaunchListener* flops = {})
      : compute(Stream::inline_cpu("compute", {.listener = flops})),
        fsdp(world, memory, compute, model.blocks(), nullptr, options) {}

  Tensor pass(int number, bool recompute = false) {
    const engine::RandomStream random{3, static_cast<std::uint64_t>(number)};
    const Tensor x = tape.empty({kRows, kWidth}, fsdp.options().precision.param, "x");
    const Tensor targets = tape.empty({kRows}, DType::kI32, "targets");
    std::vector<float> values(static_cast<std::size_t>(x.numel()));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = random.normal(i);
    engine::copy_from_floats(x, values);
    for (int i = 0; i < kRows; ++i) targets.span<std::int32_t>()[std::size_t(i)] = 7 * i % kWidth;
    return model.loss(tape, x, targets, recompute);
  }

  Memory memory{{.poison = true}};
  Stream compute;
  Tape tape{memory, compute};
  Model model;
  Fsdp fsdp;
};

FsdpOptions options_of(const std::string& strategy, DType param = DType::kBF16) {
  return {.placement = Placement::preset(strategy), .precision = {.param = param}};
}

// Bytes of each category on a rank; the base costs its bf16 shard and a slot, and nothing else.
TEST(Lora, TakesTheMemoryOfItsFormula) {
  for (const int ranks : {1, 2, 4}) {
    for (const char* strategy : {"zero3", "ddp"}) {
      comm::run_ranks(ranks, {}, [&](ProcessGroup& world) {
        Rank rank(world, options_of(strategy));
        AdamW optimizer(rank.fsdp, {});
        for (int step = 0; step < 2; ++step) {
          rank.fsdp.begin_step();
          rank.tape.backward(rank.pass(step));
          rank.fsdp.finish_step();
          optimizer.step(1e-3);
        }
        rank.fsdp.synchronize();
        constexpr std::int64_t kAdapters = (kLayers - kLowest) * kAdapter;
        const std::int64_t parts = strategy == std::string("ddp") ? 1 : ranks;
        const auto peak = [&](Category c) {
          return rank.memory.stats().peak_nbytes[static_cast<std::size_t>(c)];
        };
        EXPECT_EQ(peak(Category::kParameterShard),
                  (2 * kLayers * kBase + (2 + 4) * kAdapters) / parts);
        EXPECT_EQ(peak(Category::kGatheredParameter),
                  strategy == std::string("ddp") ? 0 : 2 * 2 * (kBase + kAdapter));
        EXPECT_EQ(peak(Category::kGradient), 4 * kAdapters / parts + 2 * 4 * kAdapter);
        EXPECT_EQ(peak(Category::kOptimizer), 2 * 4 * kAdapters / parts);
      });
    }
  }
}

// Below the lowest adapter there is no backward: nothing is gathered, computed or kept for it.
TEST(Lora, CommunicatesForAdaptersAlone) {
  for (const bool recompute : {false, true}) {
    comm::run_ranks(2, {}, [&](ProcessGroup& world) {
      CollectiveLog log;
      LoggedGroup group(world, log);
      Rank rank(group, options_of("zero3"));
      for (int step = 0; step < 3; ++step) {
        log.take();
        rank.fsdp.begin_step();
        rank.tape.backward(rank.pass(step, recompute));
        rank.fsdp.finish_step();
        const auto twice = [](const std::string& line) {
          return std::vector<std::string>(2, line);
        };
        // What is frozen and what is not lies in two flats, each with a gather of its own.
        std::vector<std::string> expected = {"all_gather h.0 forward", "all_gather h.1 forward"};
        const auto add = [&](const std::vector<std::string>& lines) {
          expected.insert(expected.end(), lines.begin(), lines.end());
        };
        add(twice("all_gather h.2 forward"));
        add(twice("all_gather h.3 forward"));
        add(twice("all_gather h.4 forward"));
        add(twice("all_gather h.3 backward"));
        add({"reduce_scatter h.4 gradient"});
        add(twice("all_gather h.2 backward"));
        add({"reduce_scatter h.3 gradient", "reduce_scatter h.2 gradient", "all_gather norm"});
        EXPECT_EQ(log.take(), expected);
      }
    });
  }
  // Kept from forward to backward is what backward needs.
  comm::run_ranks(2, {}, [&](ProcessGroup& world) {
    Rank rank(world, options_of("shard_grad_op"));
    rank.fsdp.begin_step();
    const Tensor loss = rank.pass(0);
    for (const auto& unit : rank.fsdp.units()) {
      EXPECT_EQ(unit->unsharded(), unit->name() >= "h.2") << unit->name();
    }
    rank.tape.backward(loss);
    rank.fsdp.finish_step();
  });
}

TEST(Lora, ComputesByItsFormula) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    Flops flops;
    Rank rank(world, options_of("zero3"), &flops);
    rank.fsdp.begin_step();
    flops.take();
    const Tensor loss = rank.pass(0);
    constexpr int kAdapters = kLayers - kLowest;
    constexpr double kFull = 2.0 * kRows * kBase, kLow = 2.0 * kRows * kWidth * kRank;
    EXPECT_EQ(flops.take()["linear.forward"], kLayers * kFull + kAdapters * 2 * kLow);
    rank.tape.backward(loss);
    auto backward = flops.take();
    // Adapters alone: A and B of each.
    EXPECT_EQ(backward["linear.backward_w"], kAdapters * 2 * kLow);
    // Through B to A in each layer; through base and A to the layer below in all but the lowest.
    EXPECT_EQ(backward["linear.backward_x"], kAdapters * kLow + (kAdapters - 1) * (kFull + kLow));
    rank.fsdp.finish_step();
  });
}

// Norms, and adapters and base after some steps.
std::vector<float> train(int ranks, int accum, const FsdpOptions& options, bool recompute,
                         bool changes = true) {
  std::vector<float> result;
  comm::run_ranks(ranks, {}, [&](ProcessGroup& world) {
    Rank rank(world, options);
    Sgd optimizer(rank.fsdp, {.momentum = 0.9});
    std::vector<float> mine;
    for (int step = 0; step < 4; ++step) {
      // Halfway the lowest adapter is frozen and, where there was none, the base set free.
      if (changes && step == 2) {
        rank.model.layers[kLowest]->a.trainable = rank.model.layers[kLowest]->b.trainable = false;
        rank.model.layers[0]->weight.trainable = true;
        rank.fsdp.trainable_changed();
      }
      for (int micro = 0; micro < accum; ++micro) {
        micro == 0 ? rank.fsdp.begin_step(accum) : rank.fsdp.next_micro_step();
        rank.tape.backward(rank.pass((step * accum + micro) * ranks + world.rank(), recompute));
      }
      mine.push_back(rank.fsdp.finish_step().value());
      optimizer.step(0.1);
    }
    for (const Parameter* p : rank.fsdp.parameters()) {
      for (const float v : rank.fsdp.full_parameter(*p)) mine.push_back(v);
    }
    if (world.rank() == 0) result = mine;
  });
  return result;
}

TEST(Lora, TrainsAsInOneProcess) {
  for (const DType param : {DType::kF32, DType::kBF16}) {
    const std::vector<float> expected = train(1, 4, options_of("ddp", param), false);
    for (const std::string& strategy : Placement::preset_names()) {
      for (const int ranks : {2, 4}) {
        if (testing::kIsSlow && ranks == 2) continue;
        FsdpOptions options = options_of(strategy, param);
        for (const bool recompute : {false, true}) {
          EXPECT_EQ(train(ranks, 4 / ranks, options, recompute), expected)
              << strategy << " ranks " << ranks;
        }
        const bool moves = can_offload_parameters(options.placement, options.precision);
        options.offload = {.parameters = moves ? 0.5 : 0, .gradients = 0.7, .optimizer = 0.4};
        EXPECT_EQ(train(ranks, 4 / ranks, options, true), expected)
            << strategy << " ranks " << ranks << ", offloaded";
      }
    }
  }
}

// A hook has the adapters' gradients alone; as it remembers, what is trainable stays.
TEST(Lora, TrainsTheSameUnderAHookWhateverTheStrategy) {
  HookOptions hook;
  set_hook(hook, "powersgd");
  hook.powersgd.start_step = 1;
  hook.powersgd.low_rank = {.rank = 2, .min_compression_rate = 0};
  const auto options_with_hook = [&](const std::string& strategy) {
    FsdpOptions options = options_of(strategy, DType::kF32);
    options.reducer = make_hook(hook);
    options.reducer_text = describe(hook);
    return options;
  };
  const std::vector<float> expected = train(4, 1, options_with_hook("ddp"), false, false);
  EXPECT_NE(expected, train(4, 1, options_of("ddp", DType::kF32), false, false)) << "no hook";
  hook.powersgd.offload_error = true;
  for (const std::string& strategy : Placement::preset_names()) {
    FsdpOptions options = options_with_hook(strategy);
    options.offload = {.gradients = 0.7, .optimizer = 0.4};
    EXPECT_EQ(train(4, 1, options, true, false), expected) << strategy;
  }
}

// At the end an adapter is added to its base: W + 2 A B.
TEST(Lora, AdaptersAreMergedWithSummon) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    Rank rank(world, options_of("zero3", DType::kF32));
    const auto loss = [&] { return rank.tape.no_grad([&] { return rank.pass(0); }).item(); };
    const float before = loss();
    for (auto& layer : rank.model.layers) {
      if (!layer->has_adapter) continue;
      summon(rank.fsdp, {&layer->weight, &layer->a, &layer->b},
             [](const std::vector<Tensor>& whole) {
               const auto w = whole[0].span<float>(), a = whole[1].span<float>(),
                          b = whole[2].span<float>();
               for (std::size_t i = 0; i < kWidth; ++i) {
                 for (std::size_t j = 0; j < kWidth; ++j) {
                   for (std::size_t k = 0; k < kRank; ++k) {
                     w[i * kWidth + j] += 2 * a[i * kRank + k] * b[k * kWidth + j];
                   }
                 }
               }
               for (float& v : b) v = 0;
             },
             {.write_back = true});
    }
    EXPECT_NEAR(loss(), before, 1e-5);
  });
}

}  // namespace
}  // namespace tessera::shard
