// PowerSGD: what it approximates, what it remembers, and that it survives what gradients can be.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "shard/hooks/cut_error.h"
#include "tests/shard/hooks/hook_run.h"
#include "tests/testing/errors.h"

namespace tessera::shard {
namespace {

using engine::DType;
using engine::Shape;
using testing::error_of;
using testing::has;
using testing::HookResult;
using testing::HookRun;
using testing::normals;
using testing::run_hook;

// In double, over the ranks.
std::vector<double> mean_given(const HookRun& run, int step, std::size_t i) {
  std::vector<double> mean(static_cast<std::size_t>(run.shapes[i].numel()));
  for (int rank = 0; rank < run.ranks; ++rank) {
    const std::vector<float> g = run.gradient_of(step, rank, i);
    for (std::size_t k = 0; k < mean.size(); ++k) mean[k] += g[k] / double(run.ranks);
  }
  return mean;
}

// |got - want| / |want|, Frobenius.
double distance(const std::vector<float>& got, const std::vector<double>& want) {
  double difference = 0, norm = 0;
  for (std::size_t k = 0; k < want.size(); ++k) {
    difference += (got[k] - want[k]) * (got[k] - want[k]);
    norm += want[k] * want[k];
  }
  return std::sqrt(difference / norm);
}

// u v^T of standard normal vectors.
std::vector<float> rank_one(const Shape& shape, std::uint64_t seed) {
  const std::int64_t rows = shape.dim(0), cols = shape.numel() / rows;
  const std::vector<float> u = normals(rows, 2 * seed), v = normals(cols, 2 * seed + 1);
  std::vector<float> values;
  for (const float x : u) {
    for (const float y : v) values.push_back(x * y);
  }
  return values;
}

TEST(PowerSgd, OfFullRankIsTheMeanGradient) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const bool batched : {false, true}) {
      HookRun run{.ranks = ranks, .shapes = {{24, 10}, {7}, {9, 4, 5}, {6, 6}}};
      run.hook.kind = batched ? HookKind::kBatchedPowerSgd : HookKind::kPowerSgd;
      run.hook.powersgd.low_rank.rank = 1000;
      const HookResult result = run_hook(run);
      for (int step = 0; step < run.steps; ++step) {
        for (std::size_t i = 0; i < run.shapes.size(); ++i) {
          EXPECT_LT(distance(result.gradients[0][std::size_t(step)][i], mean_given(run, step, i)),
                    1e-5)
              << "ranks " << ranks << " step " << step << " parameter " << i << " batched "
              << batched;
        }
      }
    }
  }
}

// All ranks have multiples of one product of two vectors, so their mean has rank 1 as well.
TEST(PowerSgd, OfARankOneGradientIsExact) {
  for (const std::int64_t rank : {1, 2, 4}) {
    for (const bool warm : {true, false}) {
      HookRun run{.ranks = 4};
      run.hook.powersgd.low_rank.rank = rank;
      run.hook.powersgd.warm_start = warm;
      run.gradient = [&](int step, int r, std::size_t i) {
        std::vector<float> g = rank_one(run.shapes[i], static_cast<std::uint64_t>(step) + 5);
        for (float& x : g) x *= static_cast<float>(1 + r);
        return g;
      };
      const HookResult result = run_hook(run);
      for (int step = 0; step < run.steps; ++step) {
        for (const std::size_t i : {0u, 2u}) {
          EXPECT_LT(distance(result.gradients[0][std::size_t(step)][i], mean_given(run, step, i)),
                    1e-6)
              << "rank " << rank << " warm " << warm << " step " << step << " parameter " << i;
        }
      }
    }
  }
}

TEST(PowerSgd, SendsVectorsAndWhatIsSmallAsTheyAre) {
  HookRun run{.ranks = 3, .shapes = {{24, 10}, {7}, {3, 2}, {40}, {1, 90}}};
  run.hook.powersgd.low_rank = {.rank = 2, .min_compression_rate = 2};
  const HookResult result = run_hook(run);
  run.hook = {};
  const HookResult plain = run_hook(run);
  for (std::size_t i = 0; i < run.shapes.size(); ++i) {
    const bool compressed = i == 0;  // (24 + 10) * 2 * 2 < 240
    EXPECT_EQ(result.gradients[1].back()[i] == plain.gradients[1].back()[i], !compressed) << i;
    EXPECT_EQ(result.traffic[i][0].rank, compressed ? 2 : 0) << i;
  }
}

// The identity that holds to the bit: M = fl(G + old E) and new E = fl(M - D), where the sum that
// the optimizer sees is N D; see [Note: the error to the bit].
TEST(PowerSgd, KeepsWhatItDoesNotSendToTheBit) {
  for (const int ranks : {1, 2, 4}) {  // so that N D is exact
    for (const Wire wire : {Wire::kF32, Wire::kBF16, Wire::kF16}) {
      HookRun run{.ranks = ranks, .steps = 5};
      run.hook.wire = wire;
      const HookResult result = run_hook(run);
      for (int step = 0; step < run.steps; ++step) {
        for (const std::size_t i : {0u, 2u}) {
          const std::string name = fmt::format("p{}", i);
          const std::vector<float>& d = result.gradients[0][std::size_t(step)][i];
          for (int rank = 0; rank < ranks; ++rank) {
            const std::vector<float> g = run.gradient_of(step, rank, i);
            const std::vector<float> now = result.error(step, name, rank);
            const std::vector<float> old =
                step == 0 ? std::vector<float>(g.size()) : result.error(step - 1, name, rank);
            ASSERT_EQ(now.size(), g.size());
            double largest = 0;
            for (std::size_t k = 0; k < g.size(); ++k) {
              const float m = g[k] + old[k];
              ASSERT_EQ(now[k], m - d[k]) << name << " element " << k << " step " << step;
              // In real numbers within half a unit in the last place of the new error.
              const double lost = (double(m) - d[k]) - now[k];
              ASSERT_LE(std::abs(lost), std::abs(now[k]) * 0x1p-24) << name;
              largest = std::max(largest, double(std::abs(now[k])));
            }
            EXPECT_GT(largest, 0) << "rank 2 of 10 columns leaves something";
          }
        }
      }
    }
  }
}

TEST(PowerSgd, WithoutErrorFeedbackRemembersNoError) {
  HookRun run;
  run.hook.powersgd.error_feedback = false;
  const HookResult result = run_hook(run);
  for (const HookTensor& t : result.state.back()) EXPECT_NE(t.name, "powersgd.error");
}

// Over many steps of one gradient what was sent adds up to it, so nothing is lost for good.
TEST(PowerSgd, SendsInTheEndWhatItOwes) {
  for (const bool feedback : {true, false}) {
    HookRun run{.ranks = 2, .steps = 60, .shapes = {{12, 8}, {1}}};
    run.hook.powersgd.low_rank.rank = 1;
    run.hook.powersgd.error_feedback = feedback;
    run.gradient = [&](int, int rank, std::size_t i) {
      return normals(run.shapes[i].numel(), static_cast<std::uint64_t>(rank) + 3);
    };
    const HookResult result = run_hook(run);
    std::vector<float> sent(96);
    for (const auto& step : result.gradients[0]) {
      for (std::size_t k = 0; k < sent.size(); ++k) sent[k] += step[0][k] / 60.0f;
    }
    const double left = distance(sent, mean_given(run, 0, 0));
    EXPECT_EQ(left < 0.1, feedback) << left;
  }
}

TEST(PowerSgd, EveryRankHasTheSameBits) {
  for (const int ranks : {2, 3, 4}) {
    for (const Wire wire : {Wire::kF32, Wire::kBF16, Wire::kF16}) {
      HookRun run{.ranks = ranks, .accum = 2};
      run.hook.wire = wire;
      const HookResult result = run_hook(run);
      for (int rank = 1; rank < ranks; ++rank) {
        EXPECT_EQ(result.sums[std::size_t(rank)], result.sums[0]) << ranks << " ranks";
      }
    }
  }
}

TEST(PowerSgd, StartsWhenItIsToldTo) {
  HookRun run{.ranks = 3, .steps = 4};
  run.hook.powersgd.start_step = 2;
  const HookResult result = run_hook(run);
  run.hook = {};
  const HookResult plain = run_hook(run);
  for (std::size_t step = 0; step < 4; ++step) {
    EXPECT_EQ(result.gradients[0][step] == plain.gradients[0][step], step < 2) << step;
  }
}

// What is not finite
// -----------------------------------------------------------------------------------------

bool all_finite(const std::vector<float>& values) {
  return std::ranges::all_of(values, [](float x) { return std::isfinite(x); });
}

TEST(KeptErrors, LeaveOutWhatIsNotFinite) {
  using Values = std::vector<float>;
  const engine::Stream stream = engine::Stream::inline_cpu("compute");
  for (const bool in_place : {true, false}) {
    EXPECT_EQ(testing::kept_errors(stream, DType::kF32, 0, in_place), (Values{2, 3.4e38f, 7, 7}));
    EXPECT_EQ(testing::kept_errors(stream, DType::kBF16, 0, in_place), (Values{2, 7, 7, 7}));
    EXPECT_EQ(testing::kept_errors(stream, DType::kF32, 1, in_place), (Values{7, 7, 7, 7}));
  }
}

TEST(PowerSgd, SurvivesZeros) {
  HookRun run{.ranks = 2, .steps = 6};
  run.hook.powersgd.low_rank.rank = 3;
  run.gradient = [&](int step, int, std::size_t i) {
    std::vector<float> g(static_cast<std::size_t>(run.shapes[i].numel()));
    if (step == 0 || step == 3) return g;
    g = rank_one(run.shapes[i], static_cast<std::uint64_t>(step));
    const std::int64_t cols = run.shapes[i].numel() / run.shapes[i].dim(0);
    for (std::size_t k = 0; k < g.size(); ++k) {
      if (std::int64_t(k) % cols == 1 || std::int64_t(k) / cols == 2) g[k] = 0;
    }
    return g;
  };
  const HookResult result = run_hook(run);
  for (int step = 0; step < run.steps; ++step) {
    for (const std::size_t i : {0u, 2u}) {
      const std::vector<float>& got = result.gradients[0][std::size_t(step)][i];
      EXPECT_TRUE(all_finite(got));
      if (step == 0) {
        EXPECT_EQ(got, std::vector<float>(got.size())) << "of nothing";
      } else if (step != 3) {
        EXPECT_LT(distance(got, mean_given(run, step, i)), 1e-5) << step;
      }
    }
  }
}

// A warm start from columns that were lost would never find a second direction again.
TEST(PowerSgd, FindsAgainWhatARankDeficientGradientLost) {
  HookRun run{.ranks = 2, .steps = 5, .shapes = {{20, 12}, {1}}};
  run.gradient = [&](int step, int, std::size_t i) {
    if (i == 1) return std::vector<float>{1};
    std::vector<float> g = rank_one(run.shapes[0], 1);
    if (step < 2) return g;
    const std::vector<float> more = rank_one(run.shapes[0], 2);
    for (std::size_t k = 0; k < g.size(); ++k) g[k] += more[k];
    return g;
  };
  run.hook.powersgd.error_feedback = false;
  const HookResult result = run_hook(run);
  EXPECT_LT(distance(result.gradients[0][4][0], mean_given(run, 4, 0)), 1e-5);
}

// State
// -----------------------------------------------------------------------------------------

TEST(PowerSgd, ResumesWithTheSameBits) {
  for (const char* strategy : {"ddp", "zero3"}) {
    for (const HookKind kind : {HookKind::kPowerSgd, HookKind::kBatchedPowerSgd}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        for (const bool warm : {true, false}) {
          HookRun run{.ranks = 3, .steps = 6};
          run.options.placement = Placement::preset(strategy);
          run.hook.kind = kind;
          run.hook.powersgd.start_step = 2;
          run.hook.powersgd.error_dtype = dtype;
          run.hook.powersgd.warm_start = warm;
          const HookResult whole = run_hook(run);
          for (const int steps : {1, 4}) {  // before it starts, and after
            HookRun rest = run;
            rest.steps = run.steps - steps;
            rest.first_step = steps;
            rest.start = whole.state[std::size_t(steps) - 1];
            const HookResult resumed = run_hook(rest);
            EXPECT_EQ(resumed.gradients[0].back(), whole.gradients[0].back()) << steps;
            EXPECT_EQ(resumed.state.back(), whole.state.back()) << steps;
          }
        }
      }
    }
  }
}

// The sum over the parts of an error, in double.
std::vector<double> owed(const HookResult& result, int step, const std::string& name, int parts) {
  std::vector<double> sum;
  for (int part = 0; part < parts; ++part) {
    const std::vector<float> values = result.error(step, name, part);
    sum.resize(values.size());
    for (std::size_t k = 0; k < values.size(); ++k) sum[k] += values[k];
  }
  return sum;
}

TEST(PowerSgd, OwesAsMuchAfterAnotherNumberOfRanksTookOver) {
  struct Case {
    int ranks;
    const char* strategy;
    bool across;
    int parts;
  };
  const std::vector<Case> cases = {{2, "ddp", false, 2},   {4, "zero3", false, 4},
                                   {3, "zero2", false, 3}, {1, "ddp", false, 1},
                                   {4, "hsdp", true, 2},   {6, "hsdp", true, 3}};
  const auto made = [](const Case& c) {
    HookRun run{.ranks = c.ranks, .steps = 2};
    run.options.placement = Placement::preset(c.strategy);
    if (c.across) run.options.placement.shard_ranks = c.ranks / c.parts;
    run.hook.powersgd.across_replicas = c.across;
    run.hook.powersgd.start_step = 1;
    return run;
  };
  for (const Case& from : cases) {
    const HookResult saved = run_hook(made(from));
    for (const Case& to : cases) {
      // A step that does not compress leaves errors as they were loaded.
      HookRun run = made(to);
      run.steps = 1;
      run.hook.powersgd.start_step = 100;
      run.start = saved.state.back();
      const HookResult loaded = run_hook(run);
      for (const char* name : {"p0", "p2"}) {
        const std::vector<double> before = owed(saved, 1, name, from.parts);
        const std::vector<double> after = owed(loaded, 0, name, to.parts);
        ASSERT_EQ(after.size(), before.size());
        for (std::size_t k = 0; k < before.size(); ++k) {
          ASSERT_NEAR(after[k], before[k], 3e-7 * (1 + std::abs(before[k])))
              << name << " from " << from.strategy << from.ranks << " to " << to.strategy
              << to.ranks;
        }
      }
    }
  }
}

class TensorsInMemory final : public HookState {
 public:
  explicit TensorsInMemory(const std::vector<HookTensor>& tensors)
      : infos_(tensors.begin(), tensors.end()) {}
  std::span<const HookTensorInfo> tensors() const override { return infos_; }
  void read(std::size_t, std::int64_t, std::span<float>) const override {}

 private:
  std::vector<HookTensorInfo> infos_;
};

// Ten elements of each part of an error: 100 part + i. Remembers which were read.
class CountedState final : public HookState {
 public:
  explicit CountedState(int num_parts) {
    for (int part = 0; part < num_parts; ++part) {
      infos_.push_back({.name = "powersgd.error",
                        .parameter = "p",
                        .part = part,
                        .num_parts = num_parts,
                        .numel = 10});
    }
  }
  std::span<const HookTensorInfo> tensors() const override { return infos_; }
  void read(std::size_t index, std::int64_t first, std::span<float> out) const override {
    read_.insert(index);
    num_read_ += std::ssize(out);
    for (float& x : out) x = static_cast<float>(100 * index) + static_cast<float>(first++);
  }

  mutable std::set<std::size_t> read_;
  mutable std::int64_t num_read_ = 0;

 private:
  std::vector<HookTensorInfo> infos_;
};

TEST(PowerSgd, ReadsNoMoreOfWhatOthersOweThanItTakesOver) {
  struct Case {
    int parts_before, part, parts;
    std::set<std::size_t> read;
  };
  const std::vector<Case> cases = {
      {3, 1, 3, {1}}, {2, 1, 5, {1}}, {2, 4, 5, {}}, {4, 0, 3, {0, 3}}, {4, 1, 3, {0, 1, 3}}};
  for (const Case& c : cases) {
    const CountedState state(c.parts_before);
    const CutError error(state, "powersgd.error", "p", c.part, c.parts);
    error.check(2, 5);
    EXPECT_EQ(state.num_read_, 0);
    std::vector<float> values(5);
    error.read(2, values);
    EXPECT_EQ(state.read_, c.read);
    EXPECT_EQ(state.num_read_, 5 * std::ssize(c.read));
    for (std::size_t i = 0; i < values.size(); ++i) {
      float sum = 0;
      for (int old = c.part; old < c.parts_before; old += c.parts) {
        sum += static_cast<float>(100 * old) + 2 + static_cast<float>(i);
      }
      EXPECT_EQ(values[i], sum) << c.parts_before << " to " << c.parts << " element " << i;
    }
  }
}

TEST(CutError, NamesHookTensorAndParameter) {
  const auto errors = [](int part, int num_parts, std::int64_t begin, std::int64_t numel) {
    return HookTensor{{.name = "topk.error",
                       .parameter = "p",
                       .part = part,
                       .num_parts = num_parts,
                       .begin = begin,
                       .numel = numel},
                      std::vector<float>(static_cast<std::size_t>(numel), 1)};
  };
  const auto error_with = [](const std::vector<HookTensor>& tensors) {
    const std::string error = error_of<engine::InvalidArgument>([&] {
      const TensorsInMemory state(tensors);
      const CutError of_p(state, "topk.error", "p", 0, 3);
      of_p.check(0, 10);
    });
    EXPECT_TRUE(has(error, {"[topk] expected", "topk.error", "(p)"}));
    EXPECT_EQ(error.find("powersgd"), std::string::npos) << error;
    return error;
  };
  EXPECT_TRUE(has(error_with({}), {"got none"}));
  HookTensor other = errors(0, 1, 0, 10);
  other.name = "powersgd.error";
  EXPECT_TRUE(has(error_with({other}), {"got none"}));
  EXPECT_TRUE(has(error_with({errors(0, 2, 0, 10), errors(0, 3, 0, 10)}), {"part 0 of 3"}));
  EXPECT_TRUE(has(error_with({errors(0, 2, 0, 10)}), {"part 1 of 2", "got none of 0"}));
  EXPECT_TRUE(has(error_with({errors(0, 1, 0, 6), errors(0, 1, 7, 3)}), {"got none of 6"}));
  EXPECT_TRUE(has(error_with({errors(0, 1, 0, 6), errors(0, 1, 5, 5)}), {"got 5 twice"}));
}

TEST(CutError, WhatCannotBeDividedIsRefusedByName) {
  const auto threshold = [](const char* name, int part, int num_parts) {
    return HookTensor{{.name = name, .parameter = "p", .part = part, .num_parts = num_parts}, {}};
  };
  const std::vector<HookTensor> two = {threshold("topk.error", 1, 2),
                                       threshold("topk.threshold", 0, 2),
                                       threshold("topk.threshold", 1, 2)};
  EXPECT_EQ(find_own_part(TensorsInMemory(two), threshold("topk.threshold", 1, 2)), 2u);
  const auto error_with = [&](const std::vector<HookTensor>& tensors, const HookTensor& own) {
    return error_of<engine::InvalidArgument>([&] { find_own_part(TensorsInMemory(tensors), own); });
  };
  EXPECT_TRUE(has(error_with(two, threshold("topk.threshold", 1, 3)),
                  {"[topk] expected topk.threshold of 3 ranks", "got it of 2 (p)"}));
  EXPECT_TRUE(has(error_with({two[0]}, threshold("topk.threshold", 1, 2)),
                  {"[topk] expected topk.threshold", "got none", "(p)"}));
  EXPECT_TRUE(has(error_with({two[2]}, threshold("topk.threshold", 0, 2)),
                  {"[topk] expected part 0 of 2 of topk.threshold, got none (p)"}));
}

TEST(PowerSgd, RefusesStateThatDoesNotFit) {
  HookRun run;
  const std::vector<HookTensor> state = run_hook(run).state.back();
  const auto error_with = [&](std::vector<HookTensor> changed, std::int64_t rank = 2) {
    HookRun again = run;
    again.start = std::move(changed);
    again.hook.powersgd.low_rank.rank = rank;
    return error_of<engine::InvalidArgument>([&] { run_hook(again); });
  };
  EXPECT_TRUE(has(error_with(state, 3), {"Q of", "p0"}));
  auto changed = state;
  std::erase_if(changed, [](const HookTensor& t) { return t.part == 1; });
  EXPECT_TRUE(has(error_with(changed), {"part 1 of 2", "p0"}));
  changed = state;
  changed.push_back(state.front());
  EXPECT_TRUE(has(error_with(changed), {"twice", "p0"}));
  changed = state;
  std::erase_if(changed, [](const HookTensor& t) { return t.name == "powersgd.step"; });
  EXPECT_TRUE(has(error_with(changed), {"steps of a unit", "b0"}));
  changed = state;
  for (HookTensor& t : changed) {
    if (t.name == "powersgd.step" && t.parameter == "b0") t.parameter = "b0..b1";
  }
  EXPECT_TRUE(has(error_with(changed),
                  {"blocks packed as they were saved, into units ", "b0..b1",
                   "got a unit b0:", "unit_min_numel", "bucket_nbytes", "parallel.bucket_mb"}));
  changed = state;
  std::erase_if(changed, [](const HookTensor& t) { return t.name == "powersgd.error"; });
  EXPECT_TRUE(has(error_with(changed), {"error of a parameter", "p0"}));
}

// Choices
// -----------------------------------------------------------------------------------------

TEST(PowerSgd, OffloadedHasTheSameBits) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    HookRun run;
    run.hook.powersgd.error_dtype = dtype;
    const HookResult on_device = run_hook(run);
    run.hook.powersgd.offload_error = true;
    const HookResult offloaded = run_hook(run);
    EXPECT_EQ(offloaded.gradients, on_device.gradients);
    EXPECT_EQ(offloaded.state, on_device.state);
  }
}

TEST(PowerSgd, ErrorsInBf16AreRoundedOnce) {
  HookRun run{.ranks = 2, .steps = 1};
  const HookResult f32 = run_hook(run);
  run.hook.powersgd.error_dtype = DType::kBF16;
  const HookResult bf16 = run_hook(run);
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<float> rounded = f32.error(0, "p0", rank);
    for (float& x : rounded) x = engine::BFloat16::from_float(x).to_float();
    EXPECT_EQ(bf16.error(0, "p0", rank), rounded);
  }
}

TEST(PowerSgd, DrawsByTheSeed) {
  HookRun run{.steps = 1};
  const auto first = run_hook(run).gradients;
  run.hook.powersgd.seed = 1;
  EXPECT_NE(run_hook(run).gradients, first);
}

TEST(PowerSgd, RefusesWhatItCannotDo) {
  const auto error_with = [](const std::function<void(HookRun&)>& change) {
    HookRun run;
    change(run);
    return error_of<engine::InvalidArgument>([&] { run_hook(run); });
  };
  EXPECT_TRUE(
      has(error_with([](HookRun& r) { r.hook.powersgd.low_rank.rank = 0; }), {"rank", "0"}));
  EXPECT_TRUE(
      has(error_with([](HookRun& r) { r.hook.powersgd.low_rank.min_compression_rate = -1; }),
          {"min_compression_rate", "-1"}));
  EXPECT_TRUE(
      has(error_with([](HookRun& r) { r.hook.powersgd.start_step = -1; }), {"start_step", "-1"}));
  EXPECT_TRUE(has(error_with([](HookRun& r) { r.hook.powersgd.orthogonalize_eps = -1; }),
                  {"orthogonalize_eps", "-1"}));
  EXPECT_TRUE(has(error_with([](HookRun& r) { r.hook.powersgd.error_dtype = DType::kI32; }),
                  {"f32 or bf16", "i32"}));
  EXPECT_TRUE(has(error_with([](HookRun& r) { r.hook.powersgd.across_replicas = true; }),
                  {"across_replicas", "whole"}));
  EXPECT_TRUE(has(error_with([](HookRun& r) {
                    r.options.placement = Placement::preset("zero3");
                    r.hook.powersgd.across_replicas = true;
                  }),
                  {"across_replicas", "one"}));
  EXPECT_TRUE(has(error_with([](HookRun& r) { r.options.precision.reduce = DType::kBF16; }),
                  {"reduction dtype", "bf16", "powersgd"}));
}

}  // namespace
}  // namespace tessera::shard
