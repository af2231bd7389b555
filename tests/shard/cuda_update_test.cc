// The kernel of a rule has the CPU's bits, wherever segments and arrays begin.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "engine/copy.h"
#include "engine/memory.h"
#include "engine/stream.h"
#include "engine/tensor.h"
#include "shard/flat.h"
#include "shard/layout.h"
#include "shard/optimizer/adamw_rule.h"
#include "shard/optimizer/rule_kernels.h"
#include "shard/optimizer/sgd_rule.h"

namespace tessera::shard {
namespace {

using engine::DType;
using engine::Tensor;

constexpr double kMeanScale = 0.25, kClip = 0.5, kLr = 0.01, kDecay = 0.1;

// Of the parameters in turn: two groups, and -1: left as it is.
constexpr std::array<std::int32_t, 7> kGroups = {0, 1, 0, 1, -1, 0, 0};
const std::vector<std::int64_t> kNumels = {5, 4096, 1, 8200, 4096, 130, 9000};

std::int32_t group_of(std::size_t parameter) { return kGroups.at(parameter % kGroups.size()); }

// The gaps between the segments belong to nobody.
std::vector<Segment> segments_from(std::int64_t begin, std::int64_t gap,
                                   const std::vector<std::int64_t>& numels = kNumels) {
  std::vector<Segment> segments;
  for (const std::int64_t numel : numels) {
    segments.push_back(
        {.parameter = segments.size(), .parameter_begin = 0, .shard_begin = begin, .numel = numel});
    begin += numel + gap;
  }
  return segments;
}

struct Arrays {
  std::vector<float> p, g;
  std::vector<std::vector<float>> states;  // an empty one is not kept
};

Arrays random_arrays(std::size_t numel, std::size_t num_states, bool keeps) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const auto make = [&](bool is_positive) {
    std::vector<float> values(numel);
    for (float& x : values) x = is_positive ? std::abs(normal(random)) : normal(random);
    return values;
  };
  Arrays arrays{.p = make(false), .g = make(false), .states = {}};
  for (std::size_t k = 0; k < num_states; ++k)
    arrays.states.push_back(keeps ? make(k == 1) : std::vector<float>());
  return arrays;
}

template <class Rule>
void update_on_cpu(const Rule& rule, Arrays& arrays, const std::vector<Segment>& segments,
                   int num_steps) {
  for (const Segment& s : segments) {
    const std::int32_t group = group_of(s.parameter);
    if (group < 0) continue;
    const auto step =
        rule.prepare(static_cast<float>(kLr * (group + 1)), group * kDecay, num_steps);
    for (std::int64_t at = s.shard_begin; at < s.shard_begin + s.numel; ++at) {
      const auto i = static_cast<std::size_t>(at);
      float state[Rule::kNumStates + 1] = {};
      for (std::size_t k = 0; k < Rule::kNumStates; ++k) {
        if (!arrays.states[k].empty()) state[k] = arrays.states[k][i];
      }
      Rule::update(step, arrays.g[i] * static_cast<float>(kMeanScale * kClip), arrays.p[i], state);
      for (std::size_t k = 0; k < Rule::kNumStates; ++k) {
        if (!arrays.states[k].empty()) arrays.states[k][i] = state[k];
      }
    }
  }
}

/// `offsets`: of p, g and states from what is aligned, in turn. Returns what is on the GPU after
/// two steps, after `num_steps_before`.
template <class Rule>
Arrays update_on_gpu(const Rule& rule, const Arrays& arrays, const std::vector<Segment>& segments,
                     std::array<std::int64_t, 4> offsets, bool skips,
                     std::int32_t num_steps_before = 0) {
  const engine::Stream stream = engine::Stream::cuda("compute", 0);
  const engine::Memory memory(stream);
  const auto numel = std::ssize(arrays.p);
  const auto put = [&](std::vector<float> values, std::int64_t offset) {
    values.insert(values.begin(), static_cast<std::size_t>(offset), 0.0f);
    return Tensor::from<float>(memory, {std::ssize(values)}, values, "values")
        .slice(offset, {numel});
  };
  const Tensor p = put(arrays.p, offsets[0]), g = put(arrays.g, offsets[1]);
  std::vector<Tensor> kept;
  std::array<float*, Rule::kNumStates> states{};
  for (std::size_t k = 0; k < Rule::kNumStates; ++k) {
    if (arrays.states[k].empty()) continue;
    kept.push_back(put(arrays.states[k], offsets[2 + k]));
    states[k] = kept.back().data<float>();
  }
  std::vector<std::int32_t> group_numbers;
  for (std::size_t i = 0; i < segments.size(); ++i) group_numbers.push_back(group_of(i));
  const Tensor groups =
      Tensor::from<std::int32_t>(memory, {std::ssize(group_numbers)}, group_numbers, "groups");
  const Tensor tiles = make_tile_table(memory, segments, "tiles");
  const Tensor num_steps = Tensor::from<std::int32_t>(
      memory, {1}, std::array<std::int32_t, 1>{num_steps_before}, "num_steps");
  const Tensor norm =
      Tensor::from<std::int32_t>(memory, {2}, std::array<std::int32_t, 2>{0, skips}, "norm");
  const Tensor step =
      Tensor::zeros(memory, {(RuleKernels<Rule>::step_nbytes(2) + 7) / 8}, DType::kI64, "step");
  // The learning rate, and what the groups multiply it with and decay by.
  const std::array<double, 5> rates = {0, 1, 0, 2, kDecay};
  const Tensor table = Tensor::from<std::int64_t>(
      memory, {5}, std::bit_cast<std::array<std::int64_t, 5>>(rates), "rates");
  for (int i = 0; i < 2; ++i) {
    stream.launch(
        {.name = "update"}, [] {},
        [&](const auto& cuda_stream) {
          RuleKernels<Rule>::prepare(cuda_stream, step, rule,
                                     {kMeanScale, kClip, norm, 0, num_steps},
                                     {.table = table, .lr = kLr});
          RuleKernels<Rule>::update(cuda_stream, step, {p, g, tiles, groups}, states);
        });
  }
  Arrays result{.p = engine::to_vector<float>(p), .g = arrays.g, .states = {}};
  auto next = kept.begin();
  for (const std::vector<float>& state : arrays.states) {
    result.states.push_back(state.empty() ? state : engine::to_vector<float>(*next++));
  }
  return result;
}

template <class Rule>
void expect_bits_of_the_cpu(const Rule& rule, bool keeps) {
  for (const std::int64_t begin : {0, 1, 6}) {
    for (const std::int64_t gap : {0, 3}) {
      const std::vector<Segment> segments = segments_from(begin, gap);
      const auto numel =
          static_cast<std::size_t>(segments.back().shard_begin + segments.back().numel + 5);
      const Arrays before = random_arrays(numel, Rule::kNumStates, keeps);
      Arrays expected = before;
      for (const int step : {1, 2}) update_on_cpu(rule, expected, segments, step);
      ASSERT_NE(expected.p, before.p);
      for (const auto& offsets : {std::array<std::int64_t, 4>{0, 0, 0, 0},
                                  {4, 8, 4, 12},
                                  {1, 1, 1, 1},
                                  {0, 0, 0, 1},
                                  {0, 2, 0, 0}}) {
        const Arrays got = update_on_gpu(rule, before, segments, offsets, false);
        const std::string what = "begin " + std::to_string(begin) + ", gap " + std::to_string(gap) +
                                 ", offset of g " + std::to_string(offsets[1]);
        EXPECT_TRUE(got.p == expected.p) << what;
        EXPECT_TRUE(got.states == expected.states) << what;
      }
    }
  }
}

TEST(CudaUpdate, HasTheBitsOfTheCpu) {
  expect_bits_of_the_cpu(AdamWRule{}, true);
  expect_bits_of_the_cpu(SgdRule{.momentum = 0.9}, true);
  expect_bits_of_the_cpu(SgdRule{}, false);
}

// The powers of a step are the CPU's, whatever its number.
TEST(CudaUpdate, HasTheBitsOfTheCpuInEveryStep) {
  const std::vector<Segment> segments = segments_from(0, 0, {2000, 100});
  const Arrays before = random_arrays(2100, 2, true);
  for (const std::int32_t done : {0, 1, 2, 4, 8, 12, 30, 99, 100, 333, 1000, 4999, 123456}) {
    Arrays expected = before;
    for (const int step : {1, 2}) update_on_cpu(AdamWRule{}, expected, segments, done + step);
    const Arrays got = update_on_gpu(AdamWRule{}, before, segments, {0, 0, 0, 0}, false, done);
    EXPECT_TRUE(got.p == expected.p && got.states == expected.states) << "after step " << done;
  }
}

// More tiles than there are blocks.
TEST(CudaUpdate, HasTheBitsOfTheCpuForManySmallParameters) {
  const std::vector<Segment> segments = segments_from(0, 1, std::vector<std::int64_t>(2500, 3));
  const Arrays before = random_arrays(10000, 2, true);
  Arrays expected = before;
  for (const int step : {1, 2}) update_on_cpu(AdamWRule{}, expected, segments, step);
  const Arrays got = update_on_gpu(AdamWRule{}, before, segments, {0, 0, 0, 0}, false);
  EXPECT_TRUE(got.p == expected.p && got.states == expected.states);
}

TEST(CudaUpdate, LeavesEverythingWhereAGradientIsNotFinite) {
  const std::vector<Segment> segments = segments_from(0, 0);
  const auto numel = static_cast<std::size_t>(segments.back().shard_begin + segments.back().numel);
  const Arrays before = random_arrays(numel, 2, true);
  const Arrays got = update_on_gpu(AdamWRule{}, before, segments, {0, 0, 0, 0}, true);
  EXPECT_TRUE(got.p == before.p && got.states == before.states);
}

}  // namespace
}  // namespace tessera::shard
