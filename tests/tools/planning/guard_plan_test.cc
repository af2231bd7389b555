// What a guard may need is planned: a budget that fits holds for steps that are made again too.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "engine/io/text.h"
#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/tools/testing/gpt_run.h"
#include "tools/planning/plan_report.h"
#include "tools/planning/planner.h"
#include "tools/programs/run/audit.h"

namespace tessera::tools {
namespace {

using engine::DType;
using testing::GptRun;
using testing::TempFolder;

constexpr GptConfig kModel = {.layers = 2, .heads = 2, .dim = 16, .seq = 8, .vocab = 40};
constexpr std::int64_t kSpike = 9;  // the first step that a spike can be seen in

TrainPlan plan_of(const TrainConfig& config, int rank) {
  Gpt model(kModel);
  const engine::Shape shape{config.train.batch, kModel.seq};
  return make_plan(config, {.num_ranks = static_cast<int>(config.parallel.ranks), .rank = rank},
                   model, {{"tokens", shape, DType::kI32}, {"targets", shape, DType::kI32}});
}

TrainConfig base(const std::string& strategy) {
  TrainConfig config;
  config.device = DeviceChoice::kCpu;
  config.parallel.ranks = 2;
  config.parallel.strategy = strategy;
  config.train.steps = kSpike + 2;
  config.train.lr = 1e-3;
  config.out = "unused";
  return config;
}

// With a loss of step kSpike that is another the first time that it is computed.
GptRun run(const TrainConfig& config, const TokenDataset& data) {
  const std::int64_t samples = config.train.batch * config.train.accum * config.parallel.ranks;
  std::mutex mutex;
  std::set<std::int64_t> changed;
  return testing::run_gpt(config, kModel, data, "", nullptr, {},
                          [&](engine::Tape&, const engine::Tensor& loss, std::int64_t first) {
                            const std::lock_guard lock(mutex);
                            if (config.train.spike_factor > 0 && first / samples == kSpike - 1 &&
                                changed.insert(first).second) {
                              *loss.data<float>() *= 100;
                            }
                            return loss;
                          });
}

// Of one sample a rank, a batch is the first of what is needed, and of many most of it.
TEST(GuardPlan, ABudgetThatFitsHoldsForStepsThatAreMadeAgain) {
  const TempFolder folder;
  const TokenDataset data(TokenFile(folder.write("text.txt", std::string(900, '\7'))),
                          {.seq = kModel.seq, .vocab = kModel.vocab});
  struct Case {
    const char* strategy;
    std::int64_t batch, accum, verify_every;
    double spike_factor;
  };
  for (const Case& c :
       {Case{"zero3", 1, 1, 2, 0}, Case{"zero3", 1, 1, 0, 3}, Case{"ddp", 1, 2, 1, 0},
        Case{"ddp", 16, 2, 2, 3}, Case{"zero2", 16, 1, 2, 0}, Case{"hsdp", 4, 3, 0, 3},
        Case{"shard_grad_op", 4, 2, 2, 3}, Case{"zero1", 1, 1, 2, 3}}) {
    const std::string text = fmt::format("{} batch {} accum {} verify {} spike {}", c.strategy,
                                         c.batch, c.accum, c.verify_every, c.spike_factor);
    TrainConfig config = base(c.strategy);
    config.train.batch = c.batch;
    config.train.accum = c.accum;
    config.train.verify_every = c.verify_every;
    config.train.spike_factor = c.spike_factor;
    const GptRun free = run(config, data);
    std::int64_t num_repeated = 0;
    for (const StepRecord& step : free.steps[0]) num_repeated += step.replayed.empty() ? 0 : 1;
    EXPECT_GT(num_repeated, 0) << text;
    for (int rank = 0; rank < 2; ++rank) {
      const std::vector<StepRecord>& steps = free.steps[static_cast<std::size_t>(rank)];
      const TrainPlan plan = plan_of(config, rank);
      EXPECT_LE(steps.back().memory.peak_total_nbytes, peak_nbytes(plan)) << text << rank;
      Audit audit(plan, {.num_ranks = 2, .rank = rank}, /*val_every=*/0);
      std::int64_t num_audited = 0;
      for (const StepRecord& step : steps) {
        audit.add(step);
        const bool is_left_out =
            !step.replayed.empty() && (step.step == 1 || step.replayed != kReplayedEqual);
        num_audited += is_left_out ? 0 : 1;
      }
      EXPECT_FALSE(audit.differs()) << text << "\n"
                                    << fmt::format("{}", fmt::join(audit.lines(), "\n"));
      EXPECT_EQ(audit.lines().back(), fmt::format("{} steps are as planned", num_audited)) << text;
    }
    config.memory_budget = std::to_string(peak_nbytes(plan_of(config, 0)));
    EXPECT_EQ(run(config, data).params_sha256, free.params_sha256) << text;
  }
}

TEST(GuardPlan, APlanSaysWhatAStepThatIsMadeAgainNeeds) {
  TrainConfig config = base("zero3");
  config.train.batch = 1;
  const auto json_of = [&] {
    return testing::parse_json(plan_record(plan_of(config, 0), {.num_ranks = 2}).text());
  };
  EXPECT_FALSE(json_of().contains("repeated_peak_bytes"));
  config.train.verify_every = 4;
  const TrainPlan plan = plan_of(config, 0);
  const std::int64_t nbytes = plan.repeated.value().step_memory.peak_total_nbytes;
  EXPECT_EQ(json_of().at("repeated_peak_bytes").at("total").get<std::int64_t>(), nbytes);
  EXPECT_TRUE(testing::has(fmt::format("{}", fmt::join(memory_lines(plan), "\n")),
                           {"made again, in all", engine::with_commas(nbytes) + " B"}));
}

}  // namespace
}  // namespace tessera::tools
