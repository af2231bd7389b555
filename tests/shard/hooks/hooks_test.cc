// Communication hooks under every strategy, what they send, and the layouts and 16-bit words below.
#include "shard/hooks/hooks.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "shard/hooks/half.h"
#include "tests/shard/collective_log.h"
#include "tests/shard/hooks/hook_run.h"
#include "tests/testing/errors.h"

namespace tessera::shard {
namespace {

using engine::DType;
using engine::Shape;
using testing::error_of;
using testing::has;
using testing::hook_run_of;
using testing::HookResult;
using testing::HookRun;
using testing::normals;
using testing::run_hook;

void place(HookRun& run, const std::string& strategy, int shard_ranks) {
  run.options.placement = Placement::preset(strategy);
  run.options.placement.shard_ranks = shard_ranks;
}

// The hook sees whole gradients, so it makes the same of them whatever is sharded.
TEST(Hooks, HaveTheSameBitsUnderEveryStrategy) {
  for (const std::string& name : hook_names()) {
    if (name == "none" || name == "noop") continue;
    for (const int ranks : {1, 2, 3, 4}) {
      const HookRun run = hook_run_of(name, ranks);
      const HookResult expected = run_hook(run);
      std::vector<std::pair<std::string, int>> strategies = {
          {"zero1", 0}, {"zero2", 0}, {"zero3", 0}};
      for (const char* hybrid : {"hsdp", "hybrid_zero2", "hfsdp"}) {
        if (ranks % 2 == 0) strategies.emplace_back(hybrid, ranks / 2);
      }
      for (const auto& [strategy, shard_ranks] : strategies) {
        HookRun other = run;
        place(other, strategy, shard_ranks);
        if (strategy == "zero2" || strategy == "hsdp") other.options.offload.gradients = 0.6;
        const HookResult got = run_hook(other);
        EXPECT_EQ(got.gradients[0], expected.gradients[0])
            << name << " " << strategy << " ranks " << ranks;
        EXPECT_EQ(got.state, expected.state) << name << " " << strategy << " ranks " << ranks;
      }
    }
  }
}

TEST(Hooks, DoNotDependOnPackingButInBatches) {
  for (const std::string& name : hook_names()) {
    if (name.find("batched") != std::string::npos) continue;
    const HookRun run = hook_run_of(name, 2);
    HookRun packed = run;
    packed.options.unit_min_numel = 300;
    EXPECT_EQ(run_hook(packed).gradients, run_hook(run).gradients) << name;
  }
}

// Between replicas, what is compressed is the sum of each; ranks remember errors of their shard.
TEST(Hooks, CompressAcrossReplicasAlone) {
  for (const bool batched : {false, true}) {
    struct Case {
      const char* strategy;
      int ranks, shard_ranks, accum;
    };
    for (const Case& c :
         {Case{"hsdp", 4, 2, 1}, Case{"hsdp", 6, 3, 2}, Case{"hsdp", 4, 1, 1},
          Case{"hybrid_zero2", 4, 2, 2}, Case{"hfsdp", 4, 2, 2}, Case{"hfsdp", 6, 3, 1}}) {
      const int ranks = c.ranks, shard_ranks = c.shard_ranks;
      HookRun run = hook_run_of(batched ? "batched_powersgd" : "powersgd", ranks);
      run.accum = c.accum;
      place(run, c.strategy, shard_ranks);
      run.hook.powersgd.across_replicas = true;
      run.hook.powersgd.low_rank.rank = 1;
      run.hook.powersgd.low_rank.min_compression_rate = 0;
      const HookResult got = run_hook(run);
      // As one rank for each replica that has the sum of its gradients, but for the order of
      // sums.
      HookRun folded = hook_run_of(batched ? "batched_powersgd" : "powersgd", ranks / shard_ranks);
      folded.accum = c.accum;
      folded.hook = run.hook;
      folded.hook.powersgd.across_replicas = false;
      folded.gradient = [&](int step, int replica, std::size_t i) {
        std::vector<float> sum(static_cast<std::size_t>(run.shapes[i].numel()));
        for (int r = replica * shard_ranks; r < (replica + 1) * shard_ranks; ++r) {
          const std::vector<float> g =
              normals(run.shapes[i].numel(), static_cast<std::uint64_t>(1000 * step + 100 * r) + i);
          for (std::size_t k = 0; k < sum.size(); ++k) sum[k] += g[k];
        }
        return sum;
      };
      const HookResult expected = run_hook(folded);
      for (std::size_t step = 0; step < 3; ++step) {
        for (std::size_t i = 0; i < run.shapes.size(); ++i) {
          for (std::size_t k = 0; k < got.gradients[0][step][i].size(); ++k) {
            const float want = expected.gradients[0][step][i][k] / float(shard_ranks);
            ASSERT_NEAR(got.gradients[0][step][i][k], want, 2e-5)
                << "step " << step << " parameter " << i << " ranks " << ranks << " batched "
                << batched;
          }
        }
      }
      std::size_t errors = 0;
      for (const HookTensor& t : got.state.back()) {
        if (t.name == "powersgd.error") errors += t.values.size();
      }
      const std::size_t values = batched ? 240 + 7 + 180 + 50 + 36 : 240 + 180 + 36;
      EXPECT_EQ(errors, values * std::size_t(ranks / shard_ranks));
    }
  }
}

TEST(Hooks, Bf16IsTheReductionDtype) {
  for (const char* strategy : {"ddp", "zero3"}) {
    HookRun run = hook_run_of("bf16", 3);
    place(run, strategy, 0);
    const HookResult hook = run_hook(run);
    run.hook = {};
    run.options.precision.reduce = DType::kBF16;
    EXPECT_EQ(hook.gradients, run_hook(run).gradients) << strategy;
  }
}

float through_half(float x) { return Float16::from_float(x).to_float(); }

void expect_sums_of_halves(const HookRun& run) {
  const HookResult got = run_hook(run);
  for (std::size_t i = 0; i < run.shapes.size(); ++i) {
    std::vector<float> sum(static_cast<std::size_t>(run.shapes[i].numel()));
    for (int micro = 4; micro < 6; ++micro) {
      for (int rank = 0; rank < run.ranks; ++rank) {
        const std::vector<float> g = normals(
            run.shapes[i].numel(), static_cast<std::uint64_t>(1000 * micro + 100 * rank) + i);
        for (std::size_t k = 0; k < sum.size(); ++k) sum[k] += through_half(g[k]);
      }
    }
    for (float& x : sum) x *= static_cast<float>(1.0 / (2.0 * run.ranks));
    EXPECT_EQ(got.gradients[0].back()[i], sum) << run.ranks << " ranks, parameter " << i;
  }
}

TEST(Hooks, F16RoundsEachGradientOnceAndAddsInRankOrder) {
  for (const int ranks : {1, 2, 3, 4}) expect_sums_of_halves(hook_run_of("f16", ranks));
}

// The last of so many ranks have no element to add up.
TEST(Hooks, F16OfFewElementsOnManyRanks) {
  HookRun run = hook_run_of("f16", 14);
  run.shapes = {{7}};
  expect_sums_of_halves(run);
}

// What PowerSGD does not compress is rounded for the wire also where one rank has nobody to send
// to: a run does not depend on whether there are others.
TEST(Hooks, WhatIsNotCompressedIsRoundedOnOneRankToo) {
  const auto through_bf16 = [](float x) { return engine::BFloat16::from_float(x).to_float(); };
  for (const char* name : {"bf16+powersgd", "f16+powersgd"}) {
    HookRun run = hook_run_of(name, 1);
    run.accum = 1;
    const HookResult got = run_hook(run);
    for (int step = 0; step < run.steps; ++step) {
      std::vector<float> g = run.gradient_of(step, 0, 1);
      for (float& x : g) x = name[0] == 'b' ? through_bf16(x) : through_half(x);
      EXPECT_EQ(got.gradients[0][std::size_t(step)][1], g) << name << ", step " << step;
    }
  }
}

TEST(Hooks, F16OverflowIsFoundAsNotFinite) {
  HookRun run = hook_run_of("f16", 2);
  run.options.non_finite = NonFinite::kSkip;
  run.gradient = [&](int, int rank, std::size_t i) {
    return std::vector<float>(static_cast<std::size_t>(run.shapes[i].numel()),
                              rank == 1 && i == 3 ? 70000.0f : 1.0f);
  };
  EXPECT_TRUE(has(run_hook(run).not_finite[0], {"p3"}));
}

TEST(Hooks, NoopSendsNothing) {
  for (const char* strategy : {"ddp", "zero3"}) {
    HookRun run = hook_run_of("noop", 2);
    place(run, strategy, 0);
    const HookResult got = run_hook(run);
    for (const auto& unit : got.traffic) {
      for (const HookTraffic& t : unit) EXPECT_EQ(t.nbytes_after, 0);
    }
    std::vector<float> own(240);
    for (const int micro : {4, 5}) {
      const auto g = normals(240, static_cast<std::uint64_t>(1000 * micro));
      for (std::size_t k = 0; k < own.size(); ++k) own[k] += g[k];
    }
    for (std::size_t k = 0; k < 100; ++k) {  // what rank 0 keeps in any case
      EXPECT_EQ(got.gradients[0].back()[0][k], own[k] * 0.25f) << strategy;
    }
  }
}

// What is sent
// -----------------------------------------------------------------------------------------

// The collectives of gradients that rank 0 calls in one step.
std::vector<testing::CollectiveLog::Record> called_in_a_step(const HookRun& run) {
  std::vector<testing::CollectiveLog::Record> called;
  comm::run_ranks(run.ranks, {}, [&](comm::ProcessGroup& ranks) {
    testing::CollectiveLog log;
    testing::LoggedGroup world(ranks, log);
    const engine::Stream compute = engine::Stream::inline_cpu("compute");
    const engine::Memory memory;
    engine::Tape tape(memory, compute);
    testing::GivenGradients model(run.shapes);
    FsdpOptions options = run.options;
    options.reducer = make_hook(run.hook);
    Fsdp fsdp(world, memory, compute, model.blocks(), &model.root, options);
    log.records();
    fsdp.begin_step();
    model.run(tape, [&](std::size_t i) {
      return normals(run.shapes[i].numel(), static_cast<std::uint64_t>(i));
    });
    fsdp.finish_step();
    fsdp.synchronize();
    if (world.rank() != 0) return;
    for (auto& record : log.records()) {
      if (record.text.find("norm") == std::string::npos) called.push_back(std::move(record));
    }
  });
  return called;
}

std::vector<std::string> texts_of_a_step(const HookRun& run) {
  std::vector<std::string> lines;
  for (const auto& record : called_in_a_step(run)) lines.push_back(record.text);
  return lines;
}

TEST(Traffic, IsWhatCollectivesCarry) {
  for (const std::string name :
       {"bf16", "f16", "powersgd", "bf16+powersgd", "batched_powersgd", "f16+powersgd", "noop"}) {
    HookRun run = hook_run_of(name, 2);
    run.shapes = {{128, 64}, {128}, {256, 16, 2}, {64, 64}, {128}};  // no padding
    run.hook.powersgd.start_step = 0;
    double told = 0;
    for (const auto& unit : run_hook(run).traffic) {
      for (const HookTraffic& t : unit) told += t.nbytes_after;
    }
    std::int64_t carried = 0;
    for (const auto& record : called_in_a_step(run)) {
      const bool is_of_hook =
          record.text.starts_with("all_reduce") || record.text.starts_with("all_to_all");
      if (is_of_hook) carried += record.in_nbytes;
    }
    EXPECT_NEAR(double(carried), told, 1e-6 * told) << name;
  }
}

// P of all matrices with all that is small is one message of a unit, Q of all matrices another.
TEST(Traffic, OfACompressedUnitIsTwoMessages) {
  using Lines = std::vector<std::string>;
  HookRun run = hook_run_of("powersgd", 2);
  run.shapes = {{24, 10}, {7}, {9, 4, 5}, {6, 6}, {50}};
  run.hook.powersgd.start_step = 0;
  EXPECT_EQ(texts_of_a_step(run), (Lines{"all_reduce b3 powersgd P", "all_reduce b3 powersgd Q",
                                         "all_reduce b2 powersgd P", "all_reduce b2 powersgd Q",
                                         "all_reduce b1 powersgd P",  // a vector alone
                                         "all_reduce b0 powersgd P", "all_reduce b0 powersgd Q",
                                         "all_reduce root powersgd P"}));
  run.options.unit_min_numel = 10000;
  for (const char* name : {"powersgd", "bf16+powersgd", "batched_powersgd"}) {
    set_hook(run.hook, name);
    const Lines lines = texts_of_a_step(run);
    ASSERT_EQ(lines.size(), name == std::string("batched_powersgd") ? 4u : 3u) << name;
    EXPECT_TRUE(has(lines[0], {"all_reduce", "powersgd P"})) << name;
    EXPECT_TRUE(has(lines[1], {"all_reduce", "powersgd Q"})) << name;
    EXPECT_TRUE(has(lines[2], {"all_reduce root powersgd P"})) << name;
  }
}

TEST(Traffic, ErrorsTakeTheBytesOfWhatIsCompressed) {
  for (const std::string name : {"powersgd", "f16+powersgd"}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const bool offload : {false, true}) {
        comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
          const engine::Stream compute = engine::Stream::inline_cpu("compute");
          testing::GivenGradients model({{128, 64}, {128}, {256, 16, 2}, {64, 64}});
          HookOptions hook;
          set_hook(hook, name);
          hook.powersgd.error_dtype = dtype;
          hook.powersgd.offload_error = offload;
          const Fsdp fsdp(world, engine::Memory(compute), compute, model.blocks(), &model.root,
                          {.reducer = make_hook(hook)});
          std::int64_t on_device = 0, on_host = 0;
          for (const auto& unit : fsdp.units()) {
            const auto& reducer = dynamic_cast<const HookReducer&>(*unit->reducer());
            on_device += reducer.error_nbytes(false);
            on_host += reducer.error_nbytes(true);
          }
          // Every rank remembers all of it, whatever is sharded.
          const std::int64_t numel = 128 * 64 + 256 * 16 * 2 + 64 * 64;
          const std::int64_t nbytes = numel * engine::size_of(dtype);
          EXPECT_EQ(on_device, offload ? 0 : nbytes) << name;
          EXPECT_EQ(on_host, offload ? nbytes : 0) << name;
        });
      }
    }
  }
}

// Layout
// -----------------------------------------------------------------------------------------

TEST(LowRankLayout, CompressesWhatBecomesSmallEnough) {
  const std::vector<Shape> shapes = {{10, 40}, {400}, {4, 10, 10}, {0, 5}, {}};
  std::vector<std::int64_t> numels;
  for (const Shape& s : shapes) numels.push_back(s.numel());
  const Layout flat(numels, 1);
  const auto ranks_with = [&](std::int64_t rank, double rate) {
    const LowRankLayout layout(shapes, flat, {0, flat.flat_numel()},
                               {.rank = rank, .min_compression_rate = rate});
    std::vector<std::int64_t> ranks;
    for (std::size_t i = 0; i < shapes.size(); ++i) ranks.push_back(layout.sent(i).rank);
    return ranks;
  };
  using Ranks = std::vector<std::int64_t>;
  EXPECT_EQ(ranks_with(2, 2), (Ranks{2, 0, 0, 0, 0}));  // 100 * 2 < 400, 208 * 2 > 400
  EXPECT_EQ(ranks_with(2, 1), (Ranks{2, 0, 2, 0, 0}));
  EXPECT_EQ(ranks_with(4, 2), (Ranks{0, 0, 0, 0, 0}));  // 200 * 2 is not less than 400
  EXPECT_EQ(ranks_with(99, 0), (Ranks{10, 0, 4, 0, 0}));
}

// Whatever shards there are, their pieces cover every element of every matrix once.
TEST(LowRankLayout, OfShardsCoversEveryElementOnce) {
  const std::vector<Shape> shapes = {{24, 10}, {7}, {9, 4, 5}, {31, 33}};
  std::vector<std::int64_t> numels;
  for (const Shape& s : shapes) numels.push_back(s.numel());
  for (const bool batched : {false, true}) {
    for (int shards = 1; shards <= 7; ++shards) {
      const Layout flat(numels, shards);
      std::map<std::pair<std::size_t, std::int64_t>, int> matrix_elements;
      std::int64_t plain = 0;
      for (int shard = 0; shard < shards; ++shard) {
        const LowRankLayout layout(shapes, flat, flat.part(shard, shards),
                                   {.rank = 1, .min_compression_rate = 1, .batched = batched});
        for (const LowRankPiece& piece : layout.pieces()) {
          if (!piece.matrix) {
            plain += piece.numel;
            continue;
          }
          const LowRankMatrix& m = layout.matrices()[*piece.matrix];
          EXPECT_EQ(piece.flat, flat.offset(piece.parameter) + piece.parameter_begin);
          for (std::int64_t k = 0; k < piece.numel; ++k) {
            const std::int64_t at = piece.at - m.input + k;
            ASSERT_TRUE(at >= m.begin && at < m.begin + m.numel && at < m.num_rows * m.cols);
            ++matrix_elements[{*piece.matrix, m.row_begin * m.cols + at}];
          }
        }
      }
      EXPECT_EQ(plain, batched ? 0 : 7);
      EXPECT_EQ(std::ssize(matrix_elements), batched ? 1450 : 1443);
      for (const auto& [element, count] : matrix_elements) ASSERT_EQ(count, 1);
    }
  }
}

// Words
// -----------------------------------------------------------------------------------------

TEST(Float16, HoldsEachOfItsValues) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Float16 half{static_cast<std::uint16_t>(bits)};
    const float value = half.to_float();
    if ((bits & 0x7FFF) > 0x7C00) {
      EXPECT_TRUE(std::isnan(value) && std::isnan(through_half(value)));
    } else {
      ASSERT_EQ(Float16::from_float(value).bits, bits);
    }
  }
  EXPECT_EQ(Float16{0x0001}.to_float(), 0x1p-24f);
  EXPECT_EQ(Float16{0x0400}.to_float(), 0x1p-14f);
  EXPECT_EQ(Float16{0x7BFF}.to_float(), 65504.0f);
  EXPECT_EQ(Float16{0xC000}.to_float(), -2.0f);
}

TEST(Float16, RoundsToNearestAndTiesToEven) {
  for (std::uint32_t bits = 0; bits < 0x7BFF; ++bits) {
    const double low = Float16{static_cast<std::uint16_t>(bits)}.to_float();
    const double high = Float16{static_cast<std::uint16_t>(bits + 1)}.to_float();
    const auto middle = static_cast<float>((low + high) / 2);
    const std::uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    ASSERT_EQ(Float16::from_float(middle).bits, even);
    ASSERT_EQ(Float16::from_float(std::nextafter(middle, 0.0f)).bits, bits);
    ASSERT_EQ(Float16::from_float(std::nextafter(middle, 1e9f)).bits, bits + 1);
  }
  EXPECT_EQ(Float16::from_float(65519.996f).bits, 0x7BFF);
  EXPECT_EQ(Float16::from_float(65520.0f).bits, 0x7C00);
  EXPECT_EQ(Float16::from_float(-1e30f).bits, 0xFC00);
  EXPECT_EQ(Float16::from_float(-std::numeric_limits<float>::denorm_min()).bits, 0x8000);
}

// Names
// -----------------------------------------------------------------------------------------

TEST(Hooks, AreKnownByName) {
  HookOptions options;
  set_hook(options, "bf16+powersgd");
  EXPECT_TRUE(options.kind == HookKind::kPowerSgd && options.wire == Wire::kBF16);
  EXPECT_TRUE(has(describe(options), {"bf16+powersgd", "rank 1", "start_step 10", "in f32, warm"}));
  options.powersgd.offload_error = true;
  EXPECT_TRUE(has(describe(options), {"in f32 offloaded, warm"}));
  set_hook(options, "none");
  EXPECT_FALSE(make_hook(options));
  EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] { set_hook(options, "powersdg"); }),
                  {"powersdg", "batched_powersgd", "noop"}));
  EXPECT_TRUE(has(error_of<engine::InvalidArgument>(
                      [&] { make_hook({.kind = HookKind::kNoop, .wire = Wire::kF16}); }),
                  {"noop"}));
}

TEST(Hooks, AreWhatRanksAgreeOn) {
  const std::string error = error_of<engine::InvalidArgument>([] {
    comm::run_ranks(2, {}, [](comm::ProcessGroup& world) {
      const engine::Stream compute = engine::Stream::inline_cpu("compute");
      testing::GivenGradients model({{4, 4}, {1}});
      HookOptions hook{.kind = HookKind::kPowerSgd};
      hook.powersgd.seed = static_cast<std::uint64_t>(world.rank());
      FsdpOptions options{.placement = Placement::preset("ddp")};
      options.reducer = make_hook(hook);
      options.reducer_text = describe(hook);
      const Fsdp fsdp(world, engine::Memory(compute), compute, model.blocks(), &model.root,
                      options);
    });
  });
  EXPECT_TRUE(has(error, {"seed 0", "seed 1"}));
}

// The table of docs/hooks.md, and the groups below it.
TEST(Hooks, AreToldWhatARankKeepsAndWhoItMayTalkTo) {
  struct Row {
    bool is_whole, is_hybrid;
    std::vector<std::string> strategies;
  };
  const std::vector<Row> table = {{true, false, {"ddp", "zero1"}},
                                  {false, false, {"zero2", "zero3", "shard_grad_op"}},
                                  {false, true, {"hsdp", "hybrid_zero2", "hfsdp"}}};
  const auto expect_told = [](bool is_whole, bool is_hybrid, const std::string& strategy,
                              int ranks) {
    const int in_replica = !is_hybrid ? ranks : ranks == 1 ? 1 : ranks / 2;
    comm::run_ranks(ranks, {}, [&](comm::ProcessGroup& world) {
      SCOPED_TRACE(fmt::format("{} rank {} of {}", strategy, world.rank(), ranks));
      const engine::Stream compute = engine::Stream::inline_cpu("compute");
      testing::GivenGradients model({{24, 10}, {7}, {9, 4, 5}});
      int num_told = 0;
      FsdpOptions options{.placement = Placement::preset(strategy)};
      options.placement.shard_ranks = is_hybrid ? in_replica : 0;
      options.reducer = [&](const ReducerContext& context) {
        ++num_told;
        const std::int64_t n = context.layout.flat_numel(), parts = is_whole ? 1 : in_replica;
        EXPECT_EQ(context.range, (Range{world.rank() % parts * n / parts, n / parts}));
        const auto size_of = [](const comm::ProcessGroup* group) {
          return group == nullptr ? 1 : group->size();
        };
        const Axes& axes = context.mesh.reduce();
        EXPECT_EQ(axes.world == nullptr, ranks == 1);
        EXPECT_EQ(size_of(axes.world), ranks);
        for (const comm::ProcessGroup* group : {axes.shard, axes.replicate})
          EXPECT_TRUE(group == nullptr || group->size() > 1);
        if (!is_whole) {
          EXPECT_EQ(size_of(axes.shard), in_replica);
          EXPECT_EQ(size_of(axes.replicate), ranks / in_replica);
        }
        EXPECT_EQ(context.mesh.world().rank(), world.rank());
        EXPECT_EQ(context.mesh.world().size(), ranks);
        return make_reducer(context);
      };
      const Fsdp fsdp(world, engine::Memory(compute), compute, model.blocks(), &model.root,
                      options);
      EXPECT_EQ(num_told, std::ssize(fsdp.units()));
    });
  };
  for (const Row& row : table) {
    for (const std::string& strategy : row.strategies)
      for (const int ranks : {1, 2, 4, 6})
        expect_told(row.is_whole, row.is_hybrid, strategy, ranks);
  }
}

// What a hook owes to a parameter must reach it.
TEST(Hooks, ThatRememberRefuseWhatWouldLoseIt) {
  comm::run_ranks(2, {}, [](comm::ProcessGroup& world) {
    const engine::Stream compute = engine::Stream::inline_cpu("compute");
    for (const bool remembers : {true, false}) {
      testing::GivenGradients model({{4, 4}, {1}});
      HookOptions hook{.kind = HookKind::kPowerSgd};
      hook.powersgd.error_feedback = hook.powersgd.warm_start = remembers;
      FsdpOptions options{.placement = Placement::preset("zero3")};
      options.reducer = make_hook(hook);
      options.unused_parameters = UnusedParameters::kSkip;
      const auto wrap = [&] {
        return std::make_unique<Fsdp>(world, engine::Memory(compute), compute, model.blocks(),
                                      &model.root, options);
      };
      if (remembers) {
        EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] { wrap(); }),
                        {"UnusedParameters::kZero", "owes"}));
      } else {
        wrap();
      }
      options.unused_parameters = UnusedParameters::kZero;
      const auto fsdp = wrap();
      if (remembers) {
        EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] { fsdp->trainable_changed(); }),
                        {"[trainable_changed]", "owes"}));
      } else {
        fsdp->trainable_changed();
      }
    }
  });
}

}  // namespace
}  // namespace tessera::shard
