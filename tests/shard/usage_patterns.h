// Ways to use Fsdp other than one forward and one backward, and training with them. All regions of
// blocks are recomputed where the model says so, so they capture tensors by value.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "comm/threads.h"
#include "engine/copy.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"
#include "tests/shard/toy_model.h"

namespace tessera::testing {

inline constexpr std::int64_t kPatternNumel = 130;

// The model's layers in `order`, each in its region, between the two uses of the root.
inline engine::Tensor forward(engine::Tape& tape, ToyModel& model, const engine::Tensor& input,
                              const std::vector<int>& order,
                              engine::RegionOptions root_options = {}) {
  return tape.region(
      model.root,
      [input, order, &tape, &model] {
        engine::Tensor x = affine(tape, input, model.scale, nullptr);
        for (const int i : order) {
          auto& l = *model.layers[static_cast<std::size_t>(i)];
          x = tape.region(l.block, [x, &tape, &l] { return affine(tape, x, l.weight, &l.bias); },
                          {.recompute = model.recomputes});
        }
        return sum(tape, affine(tape, x, model.scale, nullptr));
      },
      root_options);
}

// The root is a head: used last alone.
inline engine::Tensor forward_to_head(engine::Tape& tape, ToyModel& model,
                                      const engine::Tensor& input, bool recompute) {
  return tape.region(model.root, [&] {
    engine::Tensor x = input;
    for (const auto& layer : model.layers) {
      ToyModel::Layer& l = *layer;
      x = tape.region(l.block, [x, &tape, &l] { return affine(tape, x, l.weight, &l.bias); },
                      {.recompute = recompute || model.recomputes});
    }
    return sum(tape, affine(tape, x, model.scale, nullptr));
  });
}

// Layer `i` in its region, with `more` computed from its output inside the same region.
inline engine::Tensor nested(engine::Tape& tape, ToyModel& model, const engine::Tensor& x,
                             std::size_t i,
                             const std::function<engine::Tensor(const engine::Tensor&)>& more,
                             bool recompute = false) {
  auto& l = *model.layers[i];
  return tape.region(l.block,
                     [x, more, &tape, &l] { return more(affine(tape, x, l.weight, &l.bias)); },
                     {.recompute = recompute || model.recomputes});
}

// Layers inside each other: 0 is around 3, which is around 1, which is around 2; and 1 around
// itself.
inline engine::Tensor nested_forward(engine::Tape& tape, ToyModel& model,
                                     const engine::Tensor& input, bool recompute) {
  return tape.region(model.root, [&] {
    const auto in = [&tape, &model](std::size_t i, auto more, bool again = false) {
      return [&tape, &model, i, more, again](const engine::Tensor& x) {
        return nested(tape, model, x, i, more, again);
      };
    };
    const auto nothing = [](const engine::Tensor& x) { return x; };
    const auto all = in(0, in(3, in(1, in(2, in(1, nothing)), recompute)), recompute);
    const engine::Tensor x = all(affine(tape, input, model.scale, nullptr));
    return sum(tape, affine(tape, in(1, nothing)(x), model.scale, nullptr));
  });
}

// The weight of layer `i` alone, in the layer's region.
inline engine::Tensor borrowed(engine::Tape& tape, ToyModel& model, const engine::Tensor& x,
                               std::size_t i) {
  auto& l = *model.layers[i];
  return tape.region(l.block, [x, &tape, &l] { return affine(tape, x, l.weight, nullptr); },
                     {.recompute = model.recomputes});
}

// A region of no unit around layers 1 and 2, recomputed, in which layer 3 is looked at before it is
// used.
inline std::vector<engine::Tensor> forward_in_a_span(engine::Tape& tape, ToyModel& model,
                                                     const engine::Tensor& h,
                                                     const engine::Block& span) {
  const auto nothing = [](const engine::Tensor& y) { return y; };
  const std::vector<engine::Tensor> outputs = tape.region(
      span,
      [h, nothing, &tape, &model] {
        const engine::Tensor y = nested(tape, model, h, 1, nothing);
        auto& l = *model.layers[2];
        const auto look = [&tape, &model, &l](const engine::Tensor& z) {
          const engine::Tensor target = tape.no_grad([&] { return borrowed(tape, model, z, 3); });
          return affine(tape, target, l.weight, nullptr);
        };
        return std::vector<engine::Tensor>{nested(tape, model, y, 2, nothing),
                                           nested(tape, model, y, 2, look)};
      },
      {.recompute = true});
  return {sum(tape, nested(tape, model, outputs[0], 3, nothing)), sum(tape, outputs[1])};
}

// One micro-step: what a user does between begin_step() and finish_step().
using PassFn = std::function<void(engine::Tape&, ToyModel&, const engine::Tensor& x, int step)>;

struct Pattern {
  std::string name;
  PassFn run;
  int num_backwards = 1;
};

inline void PrintTo(const Pattern& pattern, std::ostream* out) { *out << pattern.name; }

inline Pattern one_forward(std::string name, std::vector<int> order) {
  return {std::move(name), [order](engine::Tape& tape, ToyModel& model, const engine::Tensor& x,
                                   int) { tape.backward(forward(tape, model, x, order)); }};
}

inline std::vector<Pattern> patterns() {
  return {
      one_forward("SkippedBlock", {0, 2, 3}),
      one_forward("OnlyTheFirst", {0}),
      one_forward("NoBlock", {}),
      one_forward("OtherOrder", {2, 0, 3, 1}),
      one_forward("RepeatedBlocks", {0, 0, 1, 1, 2, 3}),
      one_forward("TwoRounds", {0, 1, 2, 3, 0, 1, 2, 3}),
      {"TwoForwards",
       [](engine::Tape& tape, ToyModel& model, const engine::Tensor& x, int) {
         const engine::Tensor first = forward(tape, model, x, {0, 1, 2, 3});
         const engine::Tensor second = forward(tape, model, x, {3, 1});
         tape.backward(std::vector<engine::Tensor>{first, second});
       }},
      {"TwoLossesOneBackwardEach",
       [](engine::Tape& tape, ToyModel& model, const engine::Tensor& x, int) {
         tape.backward(forward(tape, model, x, {0, 1, 2, 3}));
         tape.backward(forward(tape, model, x, {0, 1, 3}), 0.5f);
       },
       2},
      {"EvaluationInTheMiddle",
       [](engine::Tape& tape, ToyModel& model, const engine::Tensor& x, int) {
         const engine::Tensor loss = forward(tape, model, x, {0, 1, 2, 3});
         tape.no_grad([&] { return forward(tape, model, x, {1, 2}); });
         tape.backward(loss);
         tape.no_grad([&] { return forward(tape, model, x, {0}); });
       }},
      {"ChangesFromStepToStep",
       [](engine::Tape& tape, ToyModel& model, const engine::Tensor& x, int step) {
         const std::vector<std::vector<int>> orders = {{0, 1, 2, 3}, {1, 3}, {3, 2, 1, 0}};
         tape.backward(forward(tape, model, x, orders[static_cast<std::size_t>(step % 3)]));
       }},
      {"LossOnAnIntermediate",
       [](engine::Tape& tape, ToyModel& model, const engine::Tensor& x, int step) {
         const std::vector<engine::Tensor> losses = tape.region(model.root, [&] {
           engine::Tensor h = affine(tape, x, model.scale, nullptr);
           std::vector<engine::Tensor> sums;
           for (const auto& layer : model.layers) {
             auto& l = *layer;
             h = tape.region(l.block, [h, &tape, &l] { return affine(tape, h, l.weight, &l.bias); },
                             {.recompute = model.recomputes});
             sums.push_back(sum(tape, h));
           }
           return sums;
         });
         // With the last one, then without: the layers after the second get no gradient.
         tape.backward(step == 1 ? std::vector<engine::Tensor>{losses[1]}
                                 : std::vector<engine::Tensor>{losses[1], losses[3]});
       }},
      {"NestedUnits", [](engine::Tape& tape, ToyModel& model, const engine::Tensor& x,
                         int) { tape.backward(nested_forward(tape, model, x, false)); }},
      {"NestedAndRecomputed", [](engine::Tape& tape, ToyModel& model, const engine::Tensor& x,
                                 int) { tape.backward(nested_forward(tape, model, x, true)); }},
      {"TiedInsideAUnit",
       [](engine::Tape& tape, ToyModel& model, const engine::Tensor& x, int) {
         tape.backward(tape.region(model.root, [&] {
           engine::Tensor h = affine(tape, x, model.scale, nullptr);
           for (const auto& layer : model.layers) {
             auto& l = *layer;
             h = tape.region(l.block,
                             [h, &tape, &l] {
                               return affine(tape, affine(tape, h, l.weight, &l.bias), l.weight,
                                             nullptr);
                             },
                             {.recompute = model.recomputes});
           }
           return sum(tape, h);
         }));
       }},
      {"TiedAcrossUnits",
       [](engine::Tape& tape, ToyModel& model, const engine::Tensor& x, int step) {
         tape.backward(tape.region(model.root, [&] {
           auto& owner = *model.layers[0];
           const auto borrow = [&tape, &model](const engine::Tensor& y) {
             return borrowed(tape, model, y, 0);
           };
           engine::Tensor h = affine(tape, x, model.scale, nullptr);
           h = nested(tape, model, h, 0, [](const engine::Tensor& y) { return y; });
           h = nested(tape, model, h, 1, borrow, step == 1);
           h = nested(tape, model, h, 3, borrow);
           // Or the owner's region is around all that borrow.
           h = tape.region(owner.block,
                           [h, &tape, &model, &owner] {
                             return nested(tape, model, h, 2,
                                           [&tape, &owner](const engine::Tensor& y) {
                                             EXPECT_TRUE(owner.weight.value.buffer()->resident());
                                             return affine(tape, y, owner.weight, nullptr);
                                           });
                           },
                           {.recompute = model.recomputes});
           return sum(tape, h);
         }));
       }},
      {"BorrowedInsideARecomputedRegion",
       [](engine::Tape& tape, ToyModel& model, const engine::Tensor& x, int) {
         const auto borrow = [&tape, &model](const engine::Tensor& y) {
           return borrowed(tape, model, y, 1);
         };
         tape.backward(tape.region(model.root, [&] {
           engine::Tensor h = affine(tape, x, model.scale, nullptr);
           h = nested(tape, model, h, 0, borrow, /*recompute=*/true);
           for (const std::size_t i : {1, 2, 3}) {
             h = nested(tape, model, h, i, [](const engine::Tensor& y) { return y; });
           }
           return sum(tape, h);
         }));
       }},
      {"AroundTheNextBlock",
       [](engine::Tape& tape, ToyModel& model, const engine::Tensor& x, int) {
         const auto nothing = [](const engine::Tensor& y) { return y; };
         const auto inner = [&tape, &model, nothing](const engine::Tensor& y) {
           return nested(tape, model, y, 2, nothing);
         };
         tape.backward(tape.region(model.root, [&] {
           engine::Tensor h = affine(tape, x, model.scale, nullptr);
           h = nested(tape, model, h, 0, nothing);
           h = nested(tape, model, h, 1, inner, /*recompute=*/true);
           return sum(tape, nested(tape, model, h, 3, nothing));
         }));
       }},
      {"LooksAheadInsideARecomputedRegion",
       [](engine::Tape& tape, ToyModel& model, const engine::Tensor& x, int) {
         tape.backward(tape.region(model.root, [&] {
           auto& l = *model.layers[0];
           std::vector<engine::Tensor> outputs = tape.region(
               l.block,
               [h = affine(tape, x, model.scale, nullptr), &tape, &model, &l] {
                 const engine::Tensor y = affine(tape, h, l.weight, &l.bias);
                 const engine::Tensor target =
                     tape.no_grad([&] { return borrowed(tape, model, y, 2); });
                 return std::vector<engine::Tensor>{y, affine(tape, target, l.weight, nullptr)};
               },
               {.recompute = true});
           for (const std::size_t i : {1, 2, 3}) {
             outputs[0] = nested(tape, model, outputs[0], i, [](const auto& y) { return y; });
           }
           return std::vector<engine::Tensor>{sum(tape, outputs[0]), sum(tape, outputs[1])};
         }));
       }},
      {"LooksAheadInsideARegionOfNoUnit",
       [](engine::Tape& tape, ToyModel& model, const engine::Tensor& x, int) {
         const engine::Block span{"span", {}};
         tape.backward(tape.region(model.root, [&] {
           engine::Tensor h = affine(tape, x, model.scale, nullptr);
           h = nested(tape, model, h, 0, [](const engine::Tensor& y) { return y; });
           return forward_in_a_span(tape, model, h, span);
         }));
       }},
      {"RecomputedInTwos",
       [](engine::Tape& tape, ToyModel& model, const engine::Tensor& x, int) {
         const std::array<engine::Block, 2> spans = {engine::Block{"low"}, engine::Block{"high"}};
         tape.backward(tape.region(model.root, [&] {
           engine::Tensor h = affine(tape, x, model.scale, nullptr);
           for (const std::size_t i : {0, 1}) {
             h = tape.region(spans[i],
                             [h, i, &tape, &model] {
                               const auto nothing = [](const engine::Tensor& y) { return y; };
                               const engine::Tensor y = nested(tape, model, h, 2 * i, nothing);
                               return nested(tape, model, y, 2 * i + 1, nothing);
                             },
                             {.recompute = true});
           }
           return sum(tape, h);
         }));
       }},
      {"RootIsAHead",
       [](engine::Tape& tape, ToyModel& model, const engine::Tensor& x, int step) {
         tape.backward(forward_to_head(tape, model, x, step % 2 == 0));
       }},
      {"RecomputedRoot",
       [](engine::Tape& tape, ToyModel& model, const engine::Tensor& x, int) {
         tape.backward(forward(tape, model, x, {0, 1, 2, 3}, {.recompute = true}));
       }},
      {"RecordedAndNotInOnePass",
       [](engine::Tape& tape, ToyModel& model, const engine::Tensor& x, int step) {
         tape.backward(tape.region(model.root, [&] {
           engine::Tensor h = affine(tape, x, model.scale, nullptr);
           for (std::size_t i = 0; i < model.layers.size(); ++i) {
             auto& l = *model.layers[i];
             const auto run = [&, in = h] {
               return tape.region(l.block,
                                  [in, &tape, &l] { return affine(tape, in, l.weight, &l.bias); },
                                  {.recompute = model.recomputes});
             };
             const bool is_recorded = (i + static_cast<std::size_t>(step)) % 2 == 0;
             h = is_recorded ? run() : tape.no_grad(run);
             if (!is_recorded) h = affine(tape, h, model.scale, nullptr);
           }
           return sum(tape, h);
         }));
       }},
  };
}

struct PatternTraining {
  int ranks = 2;
  int accum = 1;
  int steps = 3;
  bool poison = true;
  int num_backwards = 1;
  bool is_async = false;  ///< a compute stream of its own, and delays that differ between ranks
  int num_gpus = 0;       ///< 0: on the CPU
  shard::FsdpOptions options = {};
  bool recompute = false;  ///< every block
  double max_norm = 5;
  std::optional<shard::UpdateGathers> in_backward = {};  ///< then without `max_norm`
  std::function<bool(const std::string& parameter)> freezes = {};
};

/// Every norm and evaluation, in order, and the parameters after the last step, of rank 0.
inline std::vector<float> train_pattern(const PatternTraining& run, const PassFn& pass) {
  std::vector<float> result;
  comm::run_ranks(run.ranks, {}, [&](comm::ProcessGroup& world) {
    shard::FsdpOptions options = run.options;
    engine::StreamOptions stream_options;
    if (run.is_async) {
      options.delay_seed = 100 + static_cast<std::uint64_t>(world.rank());
      stream_options.delay_seed = 200 + static_cast<std::uint64_t>(world.rank());
    }
    const engine::Stream compute =
        run.num_gpus > 0
            ? engine::Stream::cuda("compute", world.rank() % run.num_gpus, stream_options)
        : run.is_async ? engine::Stream::worker_cpu("compute", stream_options)
                       : engine::Stream::inline_cpu("compute");
    const engine::Memory memory(compute, {.poison = run.poison});
    engine::Tape tape(memory, compute);
    ToyModel model(4, kPatternNumel);
    model.recomputes = run.recompute;
    for (const auto& l : model.layers) {
      for (engine::Parameter* p : {&l->weight, &l->bias}) {
        p->trainable = !run.freezes || !run.freezes(p->name);
      }
    }
    shard::Fsdp fsdp(world, memory, compute, model.blocks(), &model.root, options);
    shard::AdamW optimizer(fsdp, {});
    std::vector<float> mine;
    for (int step = 0; step < run.steps; ++step) {
      const shard::MicroStep micro_step{.num_backwards = run.num_backwards};
      if (run.in_backward) optimizer.step_in_backward(1e-2, *run.in_backward);
      fsdp.begin_step(run.accum, micro_step);
      for (int micro = 0; micro < run.accum; ++micro) {
        if (micro > 0) fsdp.next_micro_step(micro_step);
        const int number = (step * run.accum + micro) * world.size() + world.rank();
        const engine::RandomStream random{7, static_cast<std::uint64_t>(number)};
        std::vector<float> values(kPatternNumel);
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = random.normal(i);
        const auto x = engine::Tensor::from<float>(memory, {kPatternNumel}, values, "x");
        pass(tape, model, x, step);
      }
      mine.push_back(fsdp.finish_step().value());
      if (!run.in_backward) {
        const double clip = run.max_norm > 0 ? shard::clip_scale(mine.back(), run.max_norm) : 1;
        optimizer.step(1e-2, shard::ClipFactor{clip});
      }
      if (step + 1 == run.steps) break;  // parameters are read while the optimizer may be at work
      const engine::Tensor ones = engine::Tensor::from<float>(
          memory, {kPatternNumel}, std::vector<float>(kPatternNumel, 1.0f));
      const engine::Tensor loss = tape.no_grad([&] {
        return forward(tape, model, ones, {0, 1, 2, 3});
      });
      compute.synchronize();
      mine.push_back(engine::to_vector<float>(loss)[0]);
    }
    for (const engine::Parameter* p : fsdp.parameters()) {
      const std::vector<float> values = fsdp.full_parameter(*p);
      mine.insert(mine.end(), values.begin(), values.end());
    }
    if (world.rank() == 0) result = mine;
  });
  return result;
}

}  // namespace tessera::testing
