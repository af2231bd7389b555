// Muon of examples/, an optimizer of whole matrices that is made of ops, with SGD for vectors.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/philox.h"
#include "engine/tape.h"
#include "examples/muon.h"
#include "ops/add.h"
#include "ops/mul.h"
#include "ops/parameter.h"
#include "ops/sum.h"
#include "shard/fsdp.h"
#include "shard/optimizer/sgd.h"
#include "shard/optimizer/step_together.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::Parameter;
using engine::Tensor;

constexpr int kMicroBatches = 4;

bool is_matrix(const Parameter& p) { return p.shape.rank() == 2; }
bool is_vector(const Parameter& p) { return !is_matrix(p); }

/// By name of a parameter.
using Values = std::map<std::string, std::vector<float>>;

// One rank with a wide and a tall matrix, which several ranks cut, each in a block with a vector.
struct Rank {
  Rank(ProcessGroup& world, const FsdpOptions& options)
      : world(world), fsdp(world, memory, compute, {&first, &second}, nullptr, options) {}

  // The loss is a sum of products, so its gradient is `gradients`.
  void backward(const Values& gradients) {
    const auto product = [&](Parameter& p) {
      const Tensor g = Tensor::from<float>(memory, p.shape, gradients.at(p.name), "gradient");
      return ops::sum(tape, ops::mul(tape, ops::parameter(tape, p), g));
    };
    const auto sum = [&](engine::Block& block, Parameter& p, Parameter& q) {
      return tape.region(block, [&] { return ops::add(tape, product(p), product(q)); });
    };
    const Tensor a = sum(first, wide, u);
    tape.backward({a, sum(second, tall, v)});
  }
  // Of as many micro-batches, whatever the number of ranks.
  GradNorm random_gradients(int step) {
    const int accum = kMicroBatches / world.size();
    for (int micro = 0; micro < accum; ++micro) {
      micro == 0 ? fsdp.begin_step(accum) : fsdp.next_micro_step();
      const auto number = (step * accum + micro) * world.size() + world.rank();
      const engine::RandomStream random{7, static_cast<std::uint64_t>(number)};
      std::uint64_t at = 0;
      Values gradients;
      for (const Parameter* p : {&wide, &u, &tall, &v}) {
        for (std::int64_t i = 0; i < p->shape.numel(); ++i) {
          gradients[p->name].push_back(random.normal(at++));
        }
      }
      backward(gradients);
    }
    return fsdp.finish_step();
  }
  Values values() {
    Values all;
    for (const Parameter* p : fsdp.parameters()) all[p->name] = fsdp.full_parameter(*p);
    all["momentum of wide"] = muon.full_state(wide, "momentum");
    all["momentum of tall"] = muon.full_state(tall, "momentum");
    return all;
  }

  ProcessGroup& world;
  engine::Memory memory{{.poison = true}};
  engine::Stream compute = engine::Stream::inline_cpu("compute");
  engine::Tape tape{memory, compute};
  Parameter wide{"wide", {6, 50}, engine::Init::normal(1)}, u{"u", {11}, engine::Init::normal(1)};
  Parameter tall{"tall", {50, 6}, engine::Init::normal(1)}, v{"v", {7}, engine::Init::normal(1)};
  engine::Block first{"first", {&wide, &u}}, second{"second", {&v, &tall}};
  Fsdp fsdp;
  Muon muon{fsdp, is_matrix};
  Sgd sgd{fsdp, {.momentum = 0.9f, .updates = is_vector}};
};

Values train(int ranks, const FsdpOptions& options) {
  Values values;
  comm::run_ranks(ranks, {}, [&](ProcessGroup& world) {
    Rank rank(world, options);
    for (int step = 0; step < 3; ++step) {
      const GradNorm norm = rank.random_gradients(step);
      step_together({{&rank.muon, 0.02}, {&rank.sgd, 0.1}}, norm, /*max_norm=*/0.5);
    }
    Values mine = rank.values();
    if (world.rank() + 1 == ranks) values = std::move(mine);
  });
  return values;
}

TEST(Muon, HasTheSameBitsForEveryStrategyAndNumberOfRanks) {
  const Values expected = train(1, {.placement = Placement::preset("ddp")});
  for (const std::string& strategy : Placement::preset_names()) {
    for (const int ranks : {1, 2, 4}) {
      FsdpOptions options{.placement = Placement::preset(strategy)};
      EXPECT_EQ(train(ranks, options), expected) << strategy << ", " << ranks << " ranks";
      options.unit_min_numel = 500;
      options.delay_seed = 3;
      EXPECT_EQ(train(ranks, options), expected) << strategy << ", " << ranks << " ranks, packed";
    }
  }
}

// See tests/golden/make_muon_golden.py.
TEST(Muon, MovesMatricesAsPyTorchDoes) {
  std::ifstream file("tests/golden/muon.json");
  const auto golden = nlohmann::json::parse(file);
  comm::run_ranks(2, {}, [&](ProcessGroup& world) {
    Rank rank(world, {.placement = Placement::preset("zero3")});
    for (const Parameter* p : {&rank.wide, &rank.tall}) {
      rank.fsdp.load(*p, golden["start"][p->name].get<std::vector<float>>());
    }
    for (const auto& step : golden["gradients"]) {
      Values gradients = step.get<Values>();
      gradients["u"].resize(11);
      gradients["v"].resize(7);
      rank.fsdp.begin_step();
      rank.backward(gradients);
      const GradNorm norm = rank.fsdp.finish_step();
      step_together({{&rank.muon, golden["lr"]}, {&rank.sgd, 0.1}}, norm, /*max_norm=*/0);
    }
    for (const Parameter* p : {&rank.wide, &rank.tall}) {
      const auto start = golden["start"][p->name].get<std::vector<float>>();
      const auto expected = golden["final"][p->name].get<std::vector<float>>();
      const std::vector<float> values = rank.fsdp.full_parameter(*p);
      double moved = 0;
      for (std::size_t i = 0; i < values.size(); ++i) {
        moved = std::max(moved, std::abs(double{expected[i]} - start[i]));
        EXPECT_NEAR(values[i], expected[i], 2e-6) << p->name << ", element " << i;
      }
      EXPECT_GT(moved, 0.01);
    }
  });
}

}  // namespace
}  // namespace tessera::shard
