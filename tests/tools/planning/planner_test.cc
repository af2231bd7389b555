// What the planner says is what runs do: bytes sent, collectives and peaks of memory, exactly.
#include "tools/planning/planner.h"
#include "tests/testing/json.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <ctime>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/sanitizers.h"
#include "tests/tools/testing/covering_configs.h"
#include "tests/tools/testing/gpt_run.h"
#include "tests/tools/testing/planned_gpt.h"
#include "tools/planning/budget.h"
#include "tools/planning/plan_report.h"
#include "tools/programs/run/audit.h"
#include "tools/programs/transformer_plan.h"

namespace tessera::tools {
namespace {

using engine::DType;
using testing::base;
using testing::GptRun;
using testing::kind_of;
using testing::kModel;
using testing::plan_of;
using testing::run_gpt;
using testing::tokens;

std::string text_of(const engine::MemoryStats& memory) {
  std::string text;
  for (int i = 0; i < engine::kNumCategories; ++i) {
    text += fmt::format("{} {}, ", name_of(static_cast<engine::Category>(i)),
                        memory.peak_nbytes[static_cast<std::size_t>(i)]);
  }
  return text + fmt::format("total {}", memory.peak_total_nbytes);
}

std::string text_of(const nlohmann::json& peaks) {
  std::string text;
  for (int i = 0; i < engine::kNumCategories; ++i) {
    const auto name = std::string(name_of(static_cast<engine::Category>(i)));
    text += fmt::format("{} {}, ", name, peaks.at(name).get<std::int64_t>());
  }
  return text + fmt::format("total {}", peaks.at("total").get<std::int64_t>());
}

void expect_terms_to_add_up(const TrainPlan& plan, const std::string& text) {
  for (const auto* memory : {&plan.memory, &plan.host_memory}) {
    const engine::MemoryStats& peaks =
        memory == &plan.memory ? plan.steps[1].step_memory : plan.steps[1].step_host_memory;
    ASSERT_EQ(memory->size(), std::size_t{engine::kNumCategories});
    for (const PlannedMemory& m : *memory) {
      const std::string what = fmt::format(
          "{}, {}{}", text, memory == &plan.memory ? "" : "host: ", name_of(m.category));
      EXPECT_EQ(m.nbytes, peaks.peak_nbytes[static_cast<std::size_t>(m.category)]) << what;
      std::int64_t nbytes = 0;
      for (const PlanTerm& term : m.terms) {
        EXPECT_GT(term.nbytes, 0) << what;
        nbytes += term.nbytes;
      }
      EXPECT_EQ(nbytes, m.nbytes) << what;
    }
  }
}

const PlannedMemory& of(const std::vector<PlannedMemory>& memory, engine::Category category) {
  return memory.at(static_cast<std::size_t>(category));
}

void expect_as_planned(const TrainConfig& config, const std::string& text) {
  const GptRun run = run_gpt(config, kModel, tokens());
  const TrainPlan first = plan_of(config);
  const int num_ranks = static_cast<int>(config.parallel.ranks);
  for (int rank = 0; rank < num_ranks; ++rank) {
    const TrainPlan plan = plan_of(config, kModel, rank);
    // A budget asks one rank of each kind.
    EXPECT_LE(peak_nbytes(plan),
              peak_nbytes(most_of_ranks(
                  num_ranks, [&](int r) { return kind_of(config, r); },
                  [&](int r) { return r == 0 ? first : plan_of(config, kModel, r); })))
        << text << ", rank " << rank;
    expect_terms_to_add_up(plan, text);
    const std::vector<StepRecord>& steps = run.steps[static_cast<std::size_t>(rank)];
    ASSERT_EQ(std::ssize(steps), config.train.steps);
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const StepRecord& measured = steps[i];
      const StepRecord& planned = planned_step(plan, measured.step);
      const std::string what = fmt::format("{}, rank {}, step {}", text, rank, i + 1);
      EXPECT_EQ(measured.traffic, planned.traffic) << what;
      EXPECT_EQ(text_of(measured.step_memory), text_of(planned.step_memory)) << what;
      EXPECT_EQ(text_of(measured.step_host_memory), text_of(planned.step_host_memory)) << what;
      // And of the run so far, with what came before the first step.
      EXPECT_EQ(text_of(measured.memory), text_of(planned.memory)) << what;
      if (rank > 0) continue;
      const nlohmann::json& logged = run.records[i];
      EXPECT_EQ(logged.at("sent_bytes").get<std::int64_t>(), planned.traffic.bytes_sent) << what;
      EXPECT_EQ(text_of(logged.at("peak_bytes")), text_of(planned.memory)) << what;
      EXPECT_EQ(logged.contains("host_peak_bytes"), planned.host_memory.has_value()) << what;
    }
  }
}

TEST(Planner, SaysWhatRunsDo) {
  using testing::config_factor;
  using Config = TrainConfig&;
  std::vector<testing::ConfigFactor> factors = testing::parallel_factors();
  factors.push_back(config_factor<std::int64_t>(
      "shard_ranks", [](Config c) -> auto& { return c.parallel.shard_ranks; },
      {{"auto", 0}, {"1", 1}, {"2", 2}, {"4", 4}}));
  factors.push_back(config_factor<shard::BackwardPrefetch>(
      "backward_prefetch", [](Config c) -> auto& { return c.parallel.backward_prefetch; },
      {{"pre", shard::BackwardPrefetch::kPre}, {"post", shard::BackwardPrefetch::kPost}}));
  factors.push_back(config_factor<std::int64_t>(
      "reductions_in_flight", [](Config c) -> auto& { return c.parallel.reductions_in_flight; },
      {{"0", 0}, {"1", 1}, {"2", 2}, {"9", 9}}));
  factors.push_back(
      config_factor<AccumComm>("accum_comm", [](Config c) -> auto& { return c.train.accum_comm; },
                               {{"every", AccumComm::kEvery}, {"last", AccumComm::kLast}}));
  factors.push_back(config_factor<shard::Precision>(
      "dtype", [](Config c) -> auto& { return c.precision; },
      {{"f32", {}},
       {"bf16", {DType::kBF16, DType::kF32, DType::kF32}},
       {"bf16_throughout", {DType::kBF16, DType::kBF16, DType::kBF16}},
       {"bf16_reduced", {DType::kF32, DType::kBF16, DType::kF32}}}));
  factors.push_back(config_factor<OptimizerKind>(
      "optimizer", [](Config c) -> auto& { return c.train.optimizer; },
      {{"adamw", OptimizerKind::kAdamW}, {"sgd", OptimizerKind::kSgd}}));
  factors.push_back(config_factor<std::int64_t>(
      "unit_min_numel", [](Config c) -> auto& { return c.parallel.unit_min_numel; },
      {{"0", 0}, {"40000", 40'000}}));
  factors.push_back(config_factor<OffloadConfig>(
      "offload", [](Config c) -> auto& { return c.offload; },
      {{"none", {}},
       {"parts", {.parameters = 0.31, .gradients = 0.62, .optimizer = 0.47, .threads = 2}},
       {"gradients+states", {.gradients = 0.62, .optimizer = 1, .threads = 2}},
       {"all", {.parameters = 1, .gradients = 1, .optimizer = 1, .threads = 1}},
       {"states", {.optimizer = 0.3, .threads = 1}}}));
  const auto hook = [](const char* name, std::int64_t start_step) {
    CommConfig comm{.hook = name};
    comm.powersgd.start_step = start_step;
    comm.powersgd.low_rank = {.rank = 2, .min_compression_rate = 1};
    return comm;
  };
  factors.push_back(
      config_factor<CommConfig>("hook", [](Config c) -> auto& { return c.comm; },
                                {{"none", {}},
                                 {"bf16", hook("bf16", 10)},
                                 {"powersgd", hook("powersgd", 0)},
                                 {"powersgd after 1", hook("powersgd", 1)},
                                 {"powersgd after 3", hook("powersgd", 3)},
                                 {"powersgd after 9", hook("powersgd", 9)},
                                 {"batched_powersgd behind 2", hook("batched_powersgd", 2)}}));
  factors.push_back(config_factor<OverlapOptimizer>(
      "overlap_optimizer", [](Config c) -> auto& { return c.train.overlap_optimizer; },
      {{"none", OverlapOptimizer::kNone},
       {"backward", OverlapOptimizer::kBackward},
       {"interleaved", OverlapOptimizer::kInterleaved}}));
  const testing::CoveringConfigs covering = testing::covering_configs(base(1), factors);
  // More shards than ranks, or a number that does not divide them.
  std::set<std::string> refused = {"ranks=1 with shard_ranks=2", "ranks=1 with shard_ranks=4",
                                   "ranks=2 with shard_ranks=4", "ranks=3 with shard_ranks=2",
                                   "ranks=3 with shard_ranks=4", "ranks=1 with reshard=2",
                                   "ranks=3 with reshard=2",     "reshard=2 with shard_ranks=1"};
  refused.insert("prefetch=0 with backward_prefetch=post");  // nothing is gathered ahead
  for (const char* whole : {"ddp", "zero1", "zero2", "hybrid_zero2"}) {  // nothing is gathered
    for (const char* level : {"reshard=true", "reshard=2", "backward_prefetch=post"}) {
      refused.insert(fmt::format("strategy={} with {}", whole, level));
    }
  }
  for (const char* no_hybrid : {"ddp", "zero1", "zero2", "zero3", "shard_grad_op"}) {
    for (const int shard_ranks : {1, 2, 4}) {
      refused.insert(fmt::format("strategy={} with shard_ranks={}", no_hybrid, shard_ranks));
    }
  }
  for (const char* dtype : {"bf16_reduced", "bf16_throughout"}) {  // a hook says what is sent
    for (const char* of : {"bf16", "powersgd", "powersgd after 1", "powersgd after 3",
                           "powersgd after 9", "batched_powersgd behind 2"}) {
      refused.insert(fmt::format("dtype={} with hook={}", dtype, of));
    }
  }
  EXPECT_EQ(covering.impossible, refused);
  EXPECT_GE(covering.rows.size(), 8u * 5);  // strategies x ways to offload
  EXPECT_LT(covering.rows.size(), 100u);
  for (std::size_t row = 0; row < covering.rows.size(); ++row) {
    if (testing::kIsSlow && row % 5 != 0) continue;
    expect_as_planned(covering.rows[row].config, covering.rows[row].text);
  }
}

// By hand: a root of 307 x 39 + 17 x 39 + 2 x 39 parameters, blocks of 12 x 39^2 + 13 x 39.
TEST(Planner, ShowsItsArithmetic) {
  TrainConfig config = base(4);
  config.parallel.prefetch = 2;
  const TrainPlan plan = plan_of(config);
  expect_terms_to_add_up(plan, "as ever");
  const std::string text = fmt::format("{}", fmt::join(plan_lines(plan, {.num_ranks = 4}), "\n"));
  EXPECT_TRUE(testing::has(
      text, {"3 slots x ", "2 states x 4 B x ", " / 4", "all_gather", "h.0 to h.3 forward",
             "reduce_scatter", "h.0 to h.3 gradient", "GFLOP/s"}));
  const auto json = testing::parse_json(plan_record(plan, {.num_ranks = 4}).text());
  EXPECT_EQ(json.at("sent_bytes").get<std::int64_t>(), plan.steps[1].traffic.bytes_sent);
  EXPECT_EQ(json.at("peak_bytes").at("optimizer").get<std::int64_t>(),
            of(plan.memory, engine::Category::kOptimizer).nbytes);
  EXPECT_EQ(json.at("collectives").size(), plan.collectives.size());
  std::int64_t sent = 0;
  for (const PlannedCollective& c : plan.collectives) sent += c.bytes_sent;
  EXPECT_EQ(sent, plan.steps[1].traffic.bytes_sent);
}

// What is offloaded is on the host what it would be on the device.
TEST(Planner, ShowsTheArithmeticOfWhatIsOffloaded) {
  struct Case {
    engine::Category category;
    OffloadConfig half, all;
    std::string formula;
  };
  const std::vector<Case> cases = {
      {engine::Category::kParameterShard,
       {.parameters = 0.5},
       {.parameters = 1},
       "parameters 4 B x "},
      {engine::Category::kGradient, {.gradients = 0.5}, {.gradients = 1}, "sums 4 B x "},
      {engine::Category::kOptimizer, {.optimizer = 0.5}, {.optimizer = 1}, "2 states x 4 B x "},
  };
  const auto term = [](const std::vector<PlannedMemory>& memory, const Case& c) {
    for (const PlanTerm& t : of(memory, c.category).terms) {
      if (t.text.starts_with(c.formula)) return t;
    }
    return PlanTerm{"", 0};
  };
  for (const int rank : {0, 1}) {
    TrainConfig config = base(2);
    const TrainPlan whole = plan_of(config, kModel, rank);
    for (const Case& c : cases) {
      const std::string what = fmt::format("rank {}, {}", rank, name_of(c.category));
      const PlanTerm held = term(whole.memory, c);
      EXPECT_TRUE(testing::has(held.text, {" / 2"})) << what;
      config.offload = c.half;
      const TrainPlan half = plan_of(config, kModel, rank);
      expect_terms_to_add_up(half, what + ", half");
      const PlanTerm kept = term(half.memory, c), moved = term(half.host_memory, c);
      EXPECT_TRUE(testing::has(kept.text, {" / 2 - ", " on the host)"})) << what;
      EXPECT_TRUE(testing::has(moved.text, {", of ", " / 2"})) << what;
      EXPECT_EQ(kept.nbytes + moved.nbytes, held.nbytes) << what;
      EXPECT_GT(moved.nbytes, held.nbytes / 3) << what;
      EXPECT_GT(kept.nbytes, held.nbytes / 3) << what;
      config.offload = c.all;
      const TrainPlan all = plan_of(config, kModel, rank);
      expect_terms_to_add_up(all, what + ", all");
      EXPECT_EQ(term(all.memory, c).nbytes, 0) << what;
      EXPECT_EQ(term(all.host_memory, c).text, held.text) << what;
      EXPECT_EQ(term(all.host_memory, c).nbytes, held.nbytes) << what;
      const std::string text =
          fmt::format("{}", fmt::join(plan_lines(all, {.num_ranks = 2}), "\n"));
      const std::string on_host = text.substr(text.find("on the host"));
      EXPECT_TRUE(testing::has(on_host, {std::string(name_of(c.category)), "  = " + held.text}))
          << what;
      const auto json = testing::parse_json(plan_record(all, {.num_ranks = 2}).text());
      const auto& told = json.at("host_memory").at(static_cast<std::size_t>(c.category));
      EXPECT_EQ(told.at("bytes"), json.at("host_peak_bytes").at(name_of(c.category))) << what;
      EXPECT_EQ(told.at("terms").at(0).at("text"), held.text) << what;
    }
  }
}

TEST(Planner, SaysWhatTheHostDoesAndWhenMemoryIsMost) {
  Gpt model(kModel);
  const engine::Shape shape{1, kModel.seq};
  std::string text;
  TraceWriter trace([&](std::string_view part) { text += part; });
  const TrainPlan plan =
      make_plan(base(2), {.num_ranks = 2}, model,
                {{"tokens", shape, DType::kI32}, {"targets", shape, DType::kI32}}, &trace);
  EXPECT_GT(plan.host_ms, 0);
  // The most that a listener sees, in the second step, is the peak; and what is launched then needs
  // it.
  double begin_us = 0, most_us = 0;
  std::int64_t most = 0, num_launches = 0;
  std::set<std::string> then;
  const auto events = testing::parse_json(text);
  for (const auto& event : events) {
    if (event.at("ph") == "X" && event.at("name") == "step 2") begin_us = event.at("ts");
  }
  for (const auto& event : events) {
    if (event.at("name") != "memory total" || event.at("ts") < begin_us) continue;
    const auto nbytes = event.at("args").at("bytes").get<std::int64_t>();
    if (nbytes > most) most_us = event.at("ts");
    most = std::max(most, nbytes);
  }
  EXPECT_EQ(most, plan.steps[1].step_memory.peak_total_nbytes);
  for (const auto& event : events) {
    if (event.at("ph") != "X" || !event.at("args").contains("flops")) continue;
    // Copies to the host are neither computation nor collectives.
    if (event.at("ts") >= begin_us && event.at("args").at("op") != "copy_values") ++num_launches;
    if (event.at("ts") == most_us) then.insert(event.at("args").at("op"));
  }
  EXPECT_TRUE(then.contains(plan.peak_at.substr(0, plan.peak_at.find(','))))
      << plan.peak_at << " not of " << fmt::format("{}", fmt::join(then, ", "));
  EXPECT_EQ(plan.num_launches, num_launches);
}

// One block on one rank. Forward: embedding; layernorm, linear, attention, linear, add_layernorm,
// linear, gelu, linear, add; layernorm, linear_cross_entropy. Backward: the loss, 3 for each linear
// (x, weight, bias), 2 embeddings, all else 1. Then the update of both units after its start; the
// loss and the wish to stop are kept, and gathered.
TEST(Planner, CountsLaunchesAsAPersonWould) {
  TrainConfig config = base(1);
  config.parallel.strategy = "ddp";
  const auto begin = std::chrono::steady_clock::now();
  const TrainPlan plan =
      plan_of(config, {.layers = 1, .heads = 1, .dim = 8, .seq = 8, .vocab = 16, .dropout = 0});
  const std::chrono::duration<double, std::milli> all = std::chrono::steady_clock::now() - begin;
  constexpr int kForward = 1 + 9 + 2, kBackward = 1 + 4 * 3 + 2 + 6, kUpdate = 1 + 2, kValues = 3;
  EXPECT_EQ(plan.num_launches, kForward + kBackward + kUpdate + kValues);
  EXPECT_GT(plan.host_ms, 0);
  EXPECT_LT(plan.host_ms, all.count());  // it is one of two steps
}

// A slow link is waited for, a fast one is not but for the first gather and the last reduction.
TEST(Planner, SaysWhichCollectivesCannotBeHidden) {
  const auto plan_with = [](double link_gbs) {
    Gpt model(kModel);
    const engine::Shape shape{1, kModel.seq};
    return make_plan(
        base(2),
        {.num_ranks = 2,
         .rates = {.flops_per_s = 1e9, .link_bytes_per_s = link_gbs * 1e9, .link_latency_s = 0}},
        model, {{"tokens", shape, DType::kI32}, {"targets", shape, DType::kI32}});
  };
  const TrainPlan slow = plan_with(0.01), fast = plan_with(100);
  EXPECT_GT(slow.steps[1].exposed_comm_ms, 0.5 * slow.steps[1].step_ms);
  EXPECT_LT(fast.steps[1].exposed_comm_ms, 0.01 * fast.steps[1].step_ms);
  double of_collectives = 0;
  for (const PlannedCollective& c : slow.collectives) of_collectives += c.exposed_ms;
  EXPECT_GT(of_collectives, 0.8 * slow.steps[1].exposed_comm_ms);
  EXPECT_LE(of_collectives, 1.001 * slow.steps[1].exposed_comm_ms);
}

// On a CPU the host waits for all sums and for their norm without a launch between.
TEST(Planner, ChargesTheWaitForTheNormToTheReductionsBeforeIt) {
  for (const char* strategy : {"zero3", "zero1", "hsdp"}) {
    TrainConfig config = base(4);
    config.parallel.strategy = strategy;
    const PlanTarget target = {.num_ranks = 4,
                               .rates = {.link_bytes_per_s = 1e7, .link_latency_s = 1e-4}};
    Gpt model(kModel);
    const engine::Shape shape{1, kModel.seq};
    const TrainPlan plan = make_plan(
        config, target, model, {{"tokens", shape, DType::kI32}, {"targets", shape, DType::kI32}});
    const auto link_ms = [&](const PlannedCollective& c) {
      return 1e3 * (target.rates.link_latency_s +
                    static_cast<double>(c.bytes_sent) / target.rates.link_bytes_per_s);
    };
    int num_norms = 0, num_whole = 0;
    double exposed_ms = 0;
    for (const PlannedCollective& c : plan.collectives) {
      exposed_ms += c.exposed_ms;
      EXPECT_LE(c.exposed_ms, link_ms(c) + 1e-5) << strategy << " " << c.label;
      if (c.label == "norm") {
        ++num_norms;
        EXPECT_NEAR(c.exposed_ms, link_ms(c), 1e-5) << strategy;
      }
      if (c.label == "root gradient") {  // the last: there is nothing to compute meanwhile
        ++num_whole;
        EXPECT_NEAR(c.exposed_ms, link_ms(c), 1e-5) << strategy;
      }
    }
    EXPECT_EQ(num_norms, 1) << strategy;
    EXPECT_GE(num_whole, 1) << strategy;
    EXPECT_NEAR(exposed_ms, plan.steps[1].exposed_comm_ms, 1e-3) << strategy;
  }
}

TEST(Planner, PlansModelsThatNoMachineHolds) {
  TrainConfig config = base(8);
  GptConfig sizes = gpt_preset("gpt2-xl");
  sizes.layers = 400;
  const TrainPlan plan = plan_of(config, sizes);
  EXPECT_GT(peak_nbytes(plan), std::int64_t{20} << 30);
}

// Without a GPU. See tests/tools/planning/emulated_plan_test.cc for what GPUs measure.
TEST(Planner, PlansForGpus) {
  Gpt model(kModel);
  const engine::Shape shape{1, kModel.seq};
  const auto make = [&] {
    return make_plan(base(2), {.num_ranks = 2, .on_gpus = true}, model,
                     {{"tokens", shape, DType::kI32}, {"targets", shape, DType::kI32}});
  };
  if (!engine::kCudaBuilt) {
    // Told of the option, and not of a stream that is no user's concern.
    EXPECT_TRUE(testing::has(testing::error_of<engine::DeviceError>(make),
                             {"[plan] expected a build with CUDA", "(device=cuda)"}));
    return;
  }
  const TrainPlan plan = make();
  const TrainPlan on_cpus = plan_of(base(2));
  EXPECT_EQ(plan.steps[1].traffic.num_collectives, on_cpus.steps[1].traffic.num_collectives);
  const auto gradients = static_cast<std::size_t>(engine::Category::kGradient);
  EXPECT_EQ(plan.memory[gradients].nbytes, on_cpus.memory[gradients].nbytes);
}

// In one direction a block has few launches, and its collectives.
TEST(Planner, ALargePlanCostsALaunchForEachOfAStep) {
  const GptConfig sizes = gpt_preset("gpt2-xl");
  const TrainPlan plan = plan_of(base(8), sizes);
  EXPECT_GT(plan.num_launches, 20 * sizes.layers);
  EXPECT_LT(plan.num_launches, 40 * sizes.layers);
}

// Seconds of this thread that a plan of so many micro-steps takes.
double plan_seconds(std::int64_t accum) {
  TrainConfig config = base(2);
  config.train.accum = accum;
  const auto now = [] {
    timespec time{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  const double begin = now();
  static_cast<void>(plan_of(config, {.layers = 1, .heads = 1, .dim = 8, .seq = 8, .vocab = 16}));
  return now() - begin;
}

TEST(Planner, CostsAsManyTimesMoreAsThereAreMicroSteps) {
  constexpr int kTimesMore = 8;
  plan_seconds(1000);
  // Before and after, as a core slows down when its neighbours begin to work.
  const double before = plan_seconds(2000), more = plan_seconds(kTimesMore * 2000);
  const double few = (before + plan_seconds(2000)) / 2;
  EXPECT_LT(more, 1.5 * kTimesMore * few);
}

// Audits
// -----------------------------------------------------------------------------------------

TEST(Audit, ComparesEachStep) {
  const TrainConfig config = base(2);
  const TrainPlan plan = plan_of(config);
  Audit audit(plan, {.num_ranks = 2}, /*val_every=*/0);
  std::int64_t number = 0;
  for (const std::size_t i : {0u, 1u, 1u}) {
    StepRecord step = plan.steps[i];
    step.step = ++number;
    audit.add(step);
  }
  audit.check();
  EXPECT_EQ(audit.lines().back(), "3 steps are as planned");
  StepRecord wrong = plan.steps[1];
  wrong.step = 4;
  wrong.traffic.bytes_sent += 4;
  audit.add(wrong);
  wrong.step = 5;
  audit.add(plan.steps[1]);
  EXPECT_TRUE(testing::has(testing::error_of<engine::InvalidArgument>([&] { audit.check(); }),
                           {"[audit]", "bytes sent", "DIFFERS", "step 4"}));
}

TEST(Audit, ComparesEveryPeak) {
  const TrainPlan plan = plan_of(base(2));
  for (int i = 0; i <= engine::kNumCategories; ++i) {
    Audit audit(plan, {.num_ranks = 2}, 0);
    StepRecord step = plan.steps[0];
    (i < engine::kNumCategories ? step.step_memory.peak_nbytes[static_cast<std::size_t>(i)]
                                : step.step_memory.peak_total_nbytes) -= 1;
    audit.add(step);
    EXPECT_THROW(audit.check(), engine::InvalidArgument) << i;
  }
}

TEST(Audit, ComparesHostMemory) {
  const TrainPlan plan = plan_of(base(2));
  Audit audit(plan, {.num_ranks = 2}, 0);
  StepRecord step = plan.steps[0];
  step.step_host_memory.peak_total_nbytes += 4;
  audit.add(step);
  EXPECT_TRUE(testing::has(testing::error_of<engine::InvalidArgument>([&] { audit.check(); }),
                           {"host: all memory", "DIFFERS", "\n  step 1 is not as planned"}));
}

TEST(Audit, LeavesOutUpdatesThatWereSkipped) {
  const TrainPlan plan = plan_of(base(2));
  Audit audit(plan, {.num_ranks = 2}, 0);
  for (std::int64_t number = 1; number <= 5; ++number) {
    StepRecord step = plan.steps[number == 1 ? 0 : 1];
    step.step = number;
    if (number == 3) step.skipped = "h.0.ln_1.weight";
    if (number == 3 || number == 4) step.traffic.num_collectives -= 1;
    audit.add(step);
  }
  audit.check();
  EXPECT_EQ(audit.lines().back(), "3 steps are as planned");
}

TEST(Audit, LeavesOutStepsAfterAValidation) {
  const TrainPlan plan = plan_of(base(2));
  Audit audit(plan, {.num_ranks = 2}, /*val_every=*/2);
  for (std::int64_t number = 1; number <= 4; ++number) {
    StepRecord step = plan.steps[number == 1 ? 0 : 1];
    step.step = number;
    if (number == 3) step.traffic.num_collectives += 1;
    audit.add(step);
  }
  audit.check();
  EXPECT_EQ(audit.lines().back(), "3 steps are as planned");
}

// Also where it follows a step after which an uninterrupted run validates.
TEST(Audit, TheFirstStepOfAResumedRunIsCompared) {
  const TrainPlan plan = plan_of(base(2));
  for (const std::int64_t start : {0, 1, 4, 6}) {
    Audit audit(plan, {.num_ranks = 2}, /*val_every=*/2);
    audit.start_after(start);
    StepRecord step = plan.steps[0];
    step.step = start + 1;
    audit.add(step);
    EXPECT_EQ(audit.lines().back(), "1 step is as planned") << start;
    Audit wrong(plan, {.num_ranks = 2}, /*val_every=*/2);
    wrong.start_after(start);
    step.traffic.bytes_sent += 4;
    wrong.add(step);
    EXPECT_EQ(wrong.lines().back(), "step " + std::to_string(start + 1) + " is not as planned");
    // The one after the next validation is left out, whatever it does.
    Audit next(plan, {.num_ranks = 2}, /*val_every=*/2);
    next.start_after(start);
    step.step = start % 2 == 0 ? start + 3 : start + 2;
    next.add(step);
    EXPECT_EQ(next.lines().back(), "no step was compared with the plan") << start;
  }
}

// 4 blocks, 17 tokens, 3 heads, width 39, 307 words. The most is there as backward passes the last
// norm: of each block two norms, the products that attention and GELU take, what those give, and
// two sums with the residual (dropout is drawn again and the products before sums are gone); of the
// root the embedding after dropout, a norm, and the logits, now the loss's gradient.
TEST(Planner, NamesTheActivations) {
  const TrainPlan plan = plan_of(base(2));
  std::vector<std::string> terms;
  for (const PlanTerm& term : plan.memory[static_cast<int>(engine::Category::kActivation)].terms) {
    terms.push_back(fmt::format("{} = {}", term.nbytes, term.text));
  }
  EXPECT_EQ(terms, (std::vector<std::string>{
                       "42432 = 4 x 4 B x 1 x 17 x 156, gelu",
                       "42432 = 4 x 4 B x 1 x 17 x 156, linear",
                       "31824 = 4 x 4 B x 1 x 17 x 117, linear",
                       "23868 = 9 x 4 B x 1 x 17 x 39, layernorm",
                       "21216 = 8 x 4 B x 1 x 17 x 39, add",
                       "20876 = 1 x 4 B x 17 x 307, cross_entropy.saved",
                       "10608 = 4 x 4 B x 1 x 17 x 39, attention",
                       "2652 = 1 x 4 B x 1 x 17 x 39, dlayernorm",
                       "2652 = 1 x 4 B x 1 x 17 x 39, dropout",
                       "816 = 4 x 4 B x 1 x 3 x 17, attention.lse",
                       "612 = 9 x 4 B x 1 x 17, layernorm.mean",
                       "612 = 9 x 4 B x 1 x 17, normalize.rstd",
                       "136 = 2 x 4 B x 1 x 17, targets",
                       "136 = 2 x 4 B x 1 x 17, tokens",
                       "136 = 1 x 4 B x 17 x 2, cross_entropy.stats",
                       "4 = 1 x 4 B, cross_entropy",
                       "4 = 1 smaller block",
                   }));
}

}  // namespace
}  // namespace tessera::tools
