// Passes whose parameters get no gradient (Tape::frozen): a generator that learns through its
// discriminator, the gradient of an input before a step, and a teacher.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/copy.h"
#include "shard/fsdp.h"
#include "shard/optimizer/sgd.h"
#include "tests/shard/collective_log.h"
#include "tests/shard/toy_model.h"
#include "tests/shard/toy_rank.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::Category;
using engine::Tape;
using engine::Tensor;
using tessera::testing::affine;
using tessera::testing::CollectiveLog;
using tessera::testing::LoggedGroup;
using tessera::testing::ToyModel;
using tessera::testing::ToyRank;

constexpr std::int64_t kNumel = 60;

struct Case {
  std::string strategy;
  int ranks = 1;
  bool recompute = false;
  std::int64_t packing = 0;
  engine::DType param = engine::DType::kF32;

  FsdpOptions options() const {
    return {.placement = Placement::preset(strategy),
            .unit_min_numel = packing,
            .precision = {.param = param}};
  }
  std::string str() const {
    return strategy + " ranks " + std::to_string(ranks) + (recompute ? " recompute" : "") +
           " packing " + std::to_string(packing) + " " + std::string(name_of(param));
  }
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const std::string& strategy : Placement::preset_names()) {
    for (const int ranks : {1, 2, 3, 4}) {
      const std::int64_t packing = ranks % 2 == 0 ? 100'000 : 0;
      for (const bool recompute : {false, true})
        all.push_back({strategy, ranks, recompute, packing});
      all.push_back({strategy, ranks, ranks > 2, packing, engine::DType::kBF16});
    }
  }
  return all;
}

// A generator and a discriminator of their own wrappers on one tape.
struct Gan {
  Gan(ProcessGroup& world, ProcessGroup& logged, const Case& c)
      : c(c),
        rank(world.rank()),
        fg(world, memory, compute, g.blocks(), &g.root, c.options()),
        fd(logged, memory, compute, d.blocks(), &d.root, c.options()) {}

  Tensor input(int number) const {
    std::vector<float> values(kNumel);
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] =
          static_cast<float>((i * 7 + static_cast<std::size_t>(number * 5 + rank)) % 11) / 8;
    return Tensor::from<float>(memory, {kNumel}, values, "z");
  }

  // Through all layers of the generator.
  Tensor fake(int number) {
    return tape.region(g.root, [&, z = input(number)] {
      Tensor x = affine(tape, z, g.scale, nullptr);
      for (const auto& layer : g.layers) {
        x = tape.region(layer->block,
                        [x, this, &l = *layer] { return affine(tape, x, l.weight, &l.bias); },
                        {.recompute = c.recompute});
      }
      return x;
    });
  }
  Tensor score(const Tensor& x) { return d.loss(tape, x, c.recompute); }

  void teach_generator(int number, bool is_frozen) {
    fg.begin_step();
    if (!is_frozen) fd.begin_step();
    const Tensor x = fake(number);
    tape.backward(is_frozen ? tape.frozen([&] { return score(x); }) : score(x));
    norms.push_back(fg.finish_step().value());
    if (!is_frozen) fd.finish_step();  // of which nobody makes a step
    sg.step(1e-2f);
  }

  void teach_discriminator(int number) {
    fd.begin_step();
    const Tensor x = tape.no_grad([&] { return fake(number); });
    tape.backward({score(x), score(input(number + 1))});
    norms.push_back(fd.finish_step().value());
    sd.step(1e-2f);
  }

  std::vector<float> values() {
    std::vector<float> all = norms;
    for (Fsdp* fsdp : {&fg, &fd})
      for (const engine::Parameter* p : fsdp->parameters())
        for (const float v : fsdp->full_parameter(*p)) all.push_back(v);
    return all;
  }

  Case c;
  int rank;
  engine::Stream compute = engine::Stream::inline_cpu("compute");
  engine::Memory memory{compute, {.poison = true}};
  Tape tape{memory, compute};
  ToyModel g{2, kNumel}, d{3, kNumel};
  Fsdp fg, fd;
  Sgd sg{fg, {.momentum = 0.9}}, sd{fd, {.momentum = 0.9}};
  std::vector<float> norms;
};

std::vector<float> train(const Case& c, bool is_frozen) {
  std::vector<float> result;
  comm::run_ranks(c.ranks, {}, [&](ProcessGroup& world) {
    Gan gan(world, world, c);
    for (int step = 0; step < 3; ++step) {
      gan.teach_generator(step, is_frozen);
      gan.teach_discriminator(step);
    }
    const std::vector<float> values = gan.values();
    if (world.rank() == 0) result = values;
  });
  return result;
}

TEST(FrozenPass, AGeneratorLearnsAsIfTheDiscriminatorsGradientsWereThrownAway) {
  for (const Case& c : cases()) EXPECT_EQ(train(c, true), train(c, false)) << c.str();
}

// Nothing is reduced, no gradient has memory, and what is gathered is given back.
TEST(FrozenPass, CostsGathersAlone) {
  for (const char* strategy : {"zero3", "zero2", "ddp", "hsdp"}) {
    const Case c{strategy, 2};
    comm::run_ranks(2, {}, [&](ProcessGroup& world) {
      CollectiveLog log;
      LoggedGroup logged(world, log);
      Gan gan(world, logged, c);
      const auto gradients = [&](const engine::MemoryStats& stats) {
        return stats.current_nbytes[static_cast<std::size_t>(Category::kGradient)];
      };
      log.take();
      const auto before = gan.memory.stats();
      const Tensor x = gan.input(1);
      gan.tape.watch(x);
      gan.tape.backward(gan.tape.frozen([&] { return gan.score(x); }));
      for (const std::string& line : log.take())
        EXPECT_EQ(line.find("all_gather"), 0u) << strategy << ": " << line;
      EXPECT_EQ(gradients(gan.memory.stats()), gradients(before)) << strategy;
      EXPECT_TRUE(gan.tape.grad(x).defined());
      EXPECT_EQ(gan.tape.num_entries(), 0u);
    });
  }
}

// The gradient of an input, then a step at an input that was moved along it: two backwards, of
// which a micro-step counts one.
TEST(FrozenPass, MayComeBeforeTheBackwardOfAStep) {
  const auto run = [](const Case& c, bool is_frozen) {
    std::vector<float> result;
    comm::run_ranks(c.ranks, {}, [&](ProcessGroup& world) {
      ToyRank rank(world, c.options(), {.blocks = 2, .numel = kNumel});
      Sgd sgd(rank.fsdp, {.momentum = 0.9});
      std::vector<float> mine;
      for (int step = 0; step < 2; ++step) {
        const Tensor x = rank.input(0.5f, static_cast<float>(step + world.rank()));
        const auto loss = [&](const Tensor& at) {
          return rank.model.loss(rank.tape, at, c.recompute);
        };
        if (is_frozen) rank.fsdp.begin_step();
        rank.tape.watch(x);
        if (is_frozen) {
          rank.tape.backward(rank.tape.frozen([&] { return loss(x); }));
        } else {  // in a step of its own, whose gradients are thrown away
          rank.fsdp.begin_step();
          rank.tape.backward(loss(x));
          rank.fsdp.finish_step();
        }
        const std::vector<float> dx = engine::to_vector<float>(rank.tape.grad(x));
        std::vector<float> moved = engine::to_vector<float>(x);
        for (std::size_t i = 0; i < dx.size(); ++i) moved[i] += 0.1f * dx[i];
        mine.insert(mine.end(), dx.begin(), dx.end());
        if (!is_frozen) rank.fsdp.begin_step();
        rank.tape.backward(loss(Tensor::from<float>(rank.memory, {kNumel}, moved)));
        mine.push_back(rank.fsdp.finish_step().value());
        sgd.step(1e-2f);
      }
      for (const float v : rank.values()) mine.push_back(v);
      if (world.rank() == 0) result = mine;
    });
    return result;
  };
  for (const Case& c : cases()) EXPECT_EQ(run(c, true), run(c, false)) << c.str();
}

// A step of a frozen pass alone has no gradients.
TEST(FrozenPass, IsNoBackwardOfAStep) {
  comm::run_ranks(2, {}, [&](ProcessGroup& world) {
    ToyRank rank(world, {.placement = Placement::preset("zero3")}, {.numel = kNumel});
    const Tensor x = rank.input();
    rank.fsdp.begin_step();
    rank.tape.watch(x);
    rank.tape.backward(rank.tape.frozen([&] { return rank.model.loss(rank.tape, x); }));
    EXPECT_EQ(rank.fsdp.finish_step().value(), 0);
  });
}

}  // namespace
}  // namespace tessera::shard
