// A run equals one with PyTorch's PowerSGD hook: see tests/golden/make_powersgd_golden.py.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "ops/cross_entropy.h"
#include "ops/linear.h"
#include "ops/relu.h"
#include "shard/fsdp.h"
#include "shard/hooks/hook.h"
#include "shard/hooks/hooks.h"
#include "shard/optimizer/sgd.h"

namespace tessera::shard {
namespace {

using engine::Block;
using engine::Memory;
using engine::Parameter;
using engine::Shape;
using engine::Stream;
using engine::Tape;
using engine::Tensor;
using nlohmann::json;

const json& golden() {
  static const json file = [] {
    std::ifstream stream("tests/golden/powersgd.json");
    return json::parse(stream);
  }();
  return file;
}

// Three linear layers, "a", "b" and "c", a block each.
struct Network {
  Network() {
    for (const std::string layer : {"a", "b", "c"}) {
      Block& block = blocks[layer];
      block.name = layer;
      for (const std::string part : {".weight", ".bias"}) {
        const std::string name = layer + part;
        const auto dims = golden()["shapes"][name].get<std::vector<std::int64_t>>();
        Parameter& p = parameters[name];
        p.name = name;
        p.shape = Shape(dims);
        block.parameters.push_back(&p);
      }
    }
  }
  std::vector<Block*> all() { return {&blocks["a"], &blocks["b"], &blocks["c"]}; }
  Tensor layer(Tape& tape, const std::string& name, const Tensor& x) {
    return tape.region(blocks[name], [&] {
      return ops::linear(tape, x, parameters[name + ".weight"], &parameters[name + ".bias"],
                         ops::WeightLayout::kOutIn);
    });
  }
  Tensor loss(Tape& tape, const Tensor& x, const Tensor& y) {
    const Tensor h = ops::relu(tape, layer(tape, "a", x));
    return ops::cross_entropy(tape, layer(tape, "c", ops::relu(tape, layer(tape, "b", h))), y);
  }

  std::map<std::string, Parameter> parameters;
  std::map<std::string, Block> blocks;
};

// What PyTorch's hook started from, and no errors.
std::vector<HookTensor> start_of(const json& run) {
  std::vector<HookTensor> tensors;
  for (const std::string layer : {"a", "b", "c"}) {
    const std::string name = layer + ".weight";
    const auto add = [&](const char* what, const std::string& of, std::vector<float> values) {
      const std::int64_t numel = std::ssize(values);
      tensors.push_back({{.name = what, .parameter = of, .numel = numel}, std::move(values)});
    };
    add("powersgd.step", layer, {0, 0});
    add("powersgd.q", name, run["q"][name].get<std::vector<float>>());
    add("powersgd.error", name, std::vector<float>(golden()["start"][name].size()));
  }
  return tensors;
}

struct Result {
  std::vector<double> loss;
  std::map<std::string, std::vector<float>> final;
};

Result train(const json& run, const std::string& strategy) {
  const json& g = golden();
  const int ranks = run["ranks"];
  const std::int64_t batch = g["batch"], pool = g["pool"];
  const auto x = g["x"].get<std::vector<float>>();
  const auto y = g["y"].get<std::vector<std::int32_t>>();
  const std::int64_t width = std::ssize(x) / pool;
  std::vector<std::vector<float>> losses(static_cast<std::size_t>(ranks));
  Result result;
  comm::run_ranks(ranks, {}, [&](comm::ProcessGroup& world) {
    const Stream compute = Stream::inline_cpu("compute");
    const Memory memory(compute);
    Tape tape(memory, compute);
    Network network;
    const HookOptions hook{
        .kind = HookKind::kPowerSgd,
        .powersgd = {.low_rank = {.rank = run["rank"], .min_compression_rate = 1},
                     .start_step = run["start_step"],
                     .orthogonalize_eps = run["eps"]}};
    FsdpOptions options{.placement = Placement::preset(strategy)};
    options.reducer = make_hook(hook);
    Fsdp fsdp(world, memory, compute, network.all(), nullptr, options);
    for (auto& [name, p] : network.parameters) {
      fsdp.load(p, g["start"][name].get<std::vector<float>>());
    }
    fsdp.parameters_changed();
    load_hooks(fsdp, start_of(run));
    Sgd optimizer(fsdp, {.momentum = g["momentum"]});
    for (int step = 0; step < g["steps"].get<int>(); ++step) {
      std::vector<float> xs;
      std::vector<std::int32_t> ys;
      for (std::int64_t i = 0; i < batch; ++i) {
        const std::int64_t at = ((step * ranks + world.rank()) * batch + i) % pool;
        xs.insert(xs.end(), x.begin() + at * width, x.begin() + (at + 1) * width);
        ys.push_back(y[static_cast<std::size_t>(at)]);
      }
      fsdp.begin_step();
      const Tensor loss = network.loss(tape, Tensor::from<float>(memory, {batch, width}, xs, "x"),
                                       Tensor::from<std::int32_t>(memory, {batch}, ys, "y"));
      losses[static_cast<std::size_t>(world.rank())].push_back(loss.item());
      tape.backward(loss);
      const GradNorm norm = fsdp.finish_step();
      optimizer.step(g["lr"], norm, /*max_norm=*/0);
    }
    for (auto& [name, p] : network.parameters) {
      const std::vector<float> values = fsdp.full_parameter(p);
      if (world.rank() == 0) result.final[name] = values;
    }
  });
  for (std::size_t step = 0; step < losses[0].size(); ++step) {
    double sum = 0;
    for (const auto& of_rank : losses) sum += of_rank[step];
    result.loss.push_back(sum / ranks);
  }
  return result;
}

TEST(PowerSgdGolden, TrainsAsPyTorchDoes) {
  ASSERT_EQ(golden()["steps"], 30);
  ASSERT_EQ(golden()["runs"].size(), 4u);
  for (const json& run : golden()["runs"]) {
    const std::string what = run["ranks"].dump() + " ranks, rank " + run["rank"].dump();
    for (const std::string strategy : {"ddp", "zero3"}) {
      const Result got = train(run, strategy);
      ASSERT_EQ(got.loss.size(), run["loss"].size());
      double largest = 0;
      for (std::size_t step = 0; step < got.loss.size(); ++step) {
        const double difference = std::abs(got.loss[step] - run["loss"][step].get<double>());
        EXPECT_LT(difference, 1e-4) << what << " step " << step;
        largest = std::max(largest, difference);
      }
      RecordProperty("largest_loss_difference", std::to_string(largest));
      double furthest = 0;
      for (const auto& [name, values] : got.final) {
        const auto expected = run["final"][name].get<std::vector<float>>();
        ASSERT_EQ(values.size(), expected.size()) << name;
        for (std::size_t i = 0; i < values.size(); ++i) {
          const double difference = std::abs(double(values[i]) - expected[i]);
          EXPECT_LT(difference, 1e-4) << what << " " << name << " element " << i;
          furthest = std::max(furthest, difference);
        }
      }
      std::printf("%s, %s: loss within %.1e, parameters within %.1e\n", what.c_str(),
                  strategy.c_str(), largest, furthest);
    }
  }
}

}  // namespace
}  // namespace tessera::shard
