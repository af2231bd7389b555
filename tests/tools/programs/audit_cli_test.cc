// --audit of the trainers: what a run says of its plan, and how one ends that is not as planned.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "engine/io/text.h"
#include "tests/testing/errors.h"
#include "tests/tools/testing/small_models.h"
#include "tests/tools/testing/tiny_training.h"
#include "tools/report/step_text.h"

namespace tessera {
namespace {

using nlohmann::json;
using testing::Flags;
using testing::has;
using testing::Outcome;

const std::string kBrokenTrainer = "tests/tools/programs/broken_trainer";

using AuditCli = testing::TinyTraining;

// Their parts are workspace. On tiles in plain C++, and on the CPU's own if it has any.
TEST_F(AuditCli, AuditsProductsOfF32InParts) {
  const std::string large = command({{"audit", "true"},
                                     {"model.layers", "1"},
                                     {"model.dim", "128"},
                                     {"model.seq", "64"},
                                     {"train.batch", "2"},
                                     {"train.steps", "2"}});
  const Outcome portable = shell(large, {{"TESSERA_CPU_GEMM", "split-portable"}});
  EXPECT_EQ(portable.exit_code, 0) << portable.err;
  EXPECT_TRUE(has(portable.out, {", f32 split without tiles", "audit of a step, rank 0"}));
  const Outcome split = shell(large + " --cpu.gemm=split");
  if (split.exit_code == 0) {
    EXPECT_TRUE(has(split.out, {"v4+amx", ", f32 split", "audit of a step, rank 0"}));
  } else {
    EXPECT_TRUE(has(split.err, {"[gemm] expected ", "AMX", "(cpu.gemm)"})) << split.err;
  }
}

TEST_F(AuditCli, AuditsEachKindOfRun) {
  const Flags loaded = {{"init.from", "tests/golden/gpt2_tiny"},
                        {"model.dim", "52"},
                        {"model.heads", "4"},
                        {"model.vocab", "307"},
                        {"data.format", "bytes"}};
  const auto with_loaded = [&](const char* strategy) {
    Flags flags = loaded;
    flags["parallel.strategy"] = strategy;
    return flags;
  };
  for (const Flags& more :
       {Flags{},
        Flags{{"parallel.strategy", "zero1"},
              {"train.overlap_optimizer", "interleaved"},
              {"train.grad_clip", "0"}},
        Flags{{"offload.optimizer", "0.5"}, {"offload.gradients", "1"}, {"train.accum", "2"}},
        Flags{{"comm.hook", "powersgd"}, {"powersgd.start_step", "1"}},
        Flags{{"comm.hook", "powersgd"}, {"train.steps", "12"}},
        Flags{{"comm.hook", "f16"}, {"parallel.strategy", "ddp"}},
        Flags{{"train.check_gradients", "true"}, {"train.max_skips", "2"}},
        Flags{{"train.verify_every", "2"}, {"train.spike_factor", "5"}},
        Flags{{"log.val_every", "1"}, {"data.val_fraction", "0.2"}},
        Flags{{"precision.param", "bf16"}, {"train.recompute", "true"}},
        Flags{{"train.recompute", "1"}}, with_loaded("zero1"), with_loaded("zero2"),
        with_loaded("zero3")}) {
    Flags flags = more;
    flags["audit"] = "true";
    const Outcome outcome = run(flags);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_TRUE(has(outcome.out, {"audit of a step, rank 0", "planned", "measured",
                                  " as planned on each of 2 ranks"}))
        << outcome.out;
    const json planned = final_record().at("planned");
    EXPECT_GT(planned.at("peak_bytes").at("total").get<std::int64_t>(), 0);
    // Of the last step that is compared: after a validation there is none.
    const char* field = more.contains("log.val_every") ? "first_step_sent_bytes" : "sent_bytes";
    const std::string sent = engine::with_commas(planned.at(field).get<std::int64_t>());
    EXPECT_TRUE(has(outcome.out, {fmt::format("  {:<24}{:>18}{:>18}", "bytes sent", sent, sent)}))
        << outcome.out;
  }
}

TEST_F(AuditCli, AuditsAModelOfEachFamily) {
  for (const testing::SmallModel& model : testing::small_model_of_each_family()) {
    for (const Flags& more :
         {Flags{},
          Flags{{"parallel.strategy", "zero2"},
                {"precision.param", "bf16"},
                {"train.recompute", "true"}},
          Flags{{"parallel.strategy", "ddp"}, {"model.dropout", "0.1"}, {"train.accum", "2"}}}) {
      SCOPED_TRACE(model.family + (more.empty() ? "" : more.at("parallel.strategy")));
      Flags flags = starting_from(model, with(more));
      flags["audit"] = "true";
      const Outcome outcome = testing::run_program(testing::kTransformer, flags);
      EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
      EXPECT_TRUE(has(outcome.out, {"3 steps are as planned on each of 2 ranks"})) << outcome.out;
    }
  }
}

TEST_F(AuditCli, TheSummaryHasThePlanNextToWhatWasMeasured) {
  for (const Flags& more :
       {Flags{}, Flags{{"audit", "true"}}, Flags{{"train.steps", "1"}},
        Flags{{"offload.optimizer", "0.5"}, {"offload.gradients", "1"}, {"train.accum", "2"}},
        Flags{{"comm.hook", "powersgd"},
              {"powersgd.start_step", "2"},
              {"powersgd.min_compression_rate", "1"},
              {"train.steps", "12"}},
        Flags{{"parallel.strategy", "zero1"}, {"memory_budget", "1GiB"}}}) {
    const Outcome outcome = run(more);
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    const json summary = final_record().at("summary"), &planned = summary.at("planned");
    for (const char* what : {"peak_bytes", "sent_bytes"}) {
      EXPECT_GT(planned.at(what), 0) << what;
      EXPECT_EQ(summary.at(what), planned.at(what)) << what << outcome.out;
    }
    const bool offloads = more.contains("offload.optimizer");
    EXPECT_EQ(planned.contains("host_peak_bytes"), offloads);
    const json none;
    EXPECT_EQ(offloads ? summary.at("host_peak_bytes") : none,
              offloads ? planned.at("host_peak_bytes") : none);
    EXPECT_EQ(outcome.out.find("\n  on host ") != std::string::npos, offloads);
    const std::string sent = tools::nbytes_text(summary.at("sent_bytes").get<double>());
    EXPECT_TRUE(
        has(outcome.out, {fmt::format("\n  sent    {0} a step by rank 0, planned {0}\n", sent),
                          " at the peak of rank 0, planned "}));
    EXPECT_EQ(final_record().contains("planned"), more.contains("audit"));
  }
}

TEST_F(AuditCli, TheSummaryShowsARunThatIsNotAsPlanned) {
  const Flags flags = with({{"fault", "send"}, {"train.steps", "2"}});
  ASSERT_EQ(testing::run_program(kBrokenTrainer, flags).exit_code, 0);
  const json summary = final_record().at("summary");
  EXPECT_GT(summary.at("sent_bytes"), summary.at("planned").at("sent_bytes"));
}

TEST_F(AuditCli, TheSummaryOfAModelThatCannotBePlannedHasNone) {
  const Outcome outcome = testing::run_program(kBrokenTrainer, with({{"fault", "read"}}));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has(outcome.out, {" at the peak of rank 0 (largest", " a step by rank 0\n"}));
  EXPECT_EQ(outcome.out.find("planned"), std::string::npos) << outcome.out;
  EXPECT_FALSE(final_record().at("summary").contains("planned"));
}

// A hook that compresses from some step on, before the checkpoint, with it or after it.
TEST_F(AuditCli, AuditsARunThatGoesOnAroundTheStartOfItsHook) {
  for (const int start_step : {2, 4, 6}) {
    Flags flags = {{"comm.hook", "powersgd"},
                   {"powersgd.start_step", std::to_string(start_step)},
                   {"powersgd.min_compression_rate", "1"},
                   {"checkpoint.every", "4"},
                   {"checkpoint.dir", folder_ / fmt::format("checkpoints{}", start_step)},
                   {"train.steps", "4"},
                   {"audit", "true"}};
    EXPECT_TRUE(has(run(flags).out, {"4 steps are as planned"})) << start_step;
    flags["train.steps"] = "9";
    flags["resume"] = "auto";
    const Outcome outcome = run(flags);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_TRUE(has(outcome.out, {"5 steps are as planned"})) << start_step << outcome.out;
    flags["plan"] = "true";
    flags.erase("audit");
    flags.erase("resume");
    const std::string line =
        fmt::format("  up to step {}, before its hook compresses, ", start_step);
    EXPECT_TRUE(has(run(flags).out, {line})) << start_step;
  }
}

TEST_F(AuditCli, AnAuditNamesTheGathersThatAreNotHidden) {
  const std::string slow_line = "gathers not hidden in the plan, at --rates.*: ";
  const auto line_of = [](const Outcome& outcome) {
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    const std::size_t at = outcome.out.find("hidden in the plan");
    if (at == std::string::npos) return std::string();
    const std::size_t begin = outcome.out.rfind('\n', at) + 1;
    return outcome.out.substr(begin, outcome.out.find('\n', at) - begin);
  };
  const Flags slow = {{"audit", "true"}, {"rates.link_gbs", "0.0001"}, {"train.accum", "2"}};
  const std::string line = line_of(run(slow));
  EXPECT_EQ(line.compare(0, slow_line.size(), slow_line), 0) << line;
  const json planned = final_record().at("planned");
  std::map<std::string, double> waits_ms;
  for (const json& c : planned.at("collectives")) {
    if (c.at("name") == "all_gather") waits_ms[c.at("label")] += c.at("exposed_ms").get<double>();
  }
  EXPECT_GT(waits_ms.at("norm"), 0.0005);
  EXPECT_GT(waits_ms.at("h.1 forward"), 0.0005);
  for (const auto& [label, ms] : waits_ms) {
    const bool is_shown = label != "norm" && label != "values" && ms > 0.0005;
    EXPECT_EQ(line.find(fmt::format("{} {:.3f} ms", label, ms)) != std::string::npos, is_shown)
        << label << " in " << line;
  }
  EXPECT_EQ(line.find("more"), std::string::npos) << line;

  Flags many = slow;
  many["model.layers"] = "8";
  many["parallel.prefetch"] = "0";
  const std::string most = line_of(run(many));
  EXPECT_EQ(std::ranges::count(most, ','), 7) << most;  // one in front of the list
  waits_ms.clear();
  const json of_many = final_record().at("planned");
  for (const json& c : of_many.at("collectives")) {
    const double ms = c.at("exposed_ms").get<double>();
    if (c.at("name") == "all_gather" && c.at("label") != "norm" && c.at("label") != "values" &&
        ms > 0.0005) {
      waits_ms[c.at("label")] += ms;
    }
  }
  std::vector<double> all_ms;
  for (const auto& [label, ms] : waits_ms) all_ms.push_back(ms);
  std::ranges::sort(all_ms, std::greater());
  ASSERT_GT(all_ms.size(), 7u);
  EXPECT_TRUE(has(most, {fmt::format(", {} more {:.3f} ms", all_ms.size() - 6,
                                     std::accumulate(all_ms.begin() + 6, all_ms.end(), 0.0))}));

  const Flags fast = {{"audit", "true"},
                      {"rates.gflops", "0.01"},
                      {"rates.link_gbs", "1e6"},
                      {"rates.link_latency_us", "0"}};
  EXPECT_EQ(line_of(run(fast)), "all gathers are hidden in the plan, at --rates.*");
  EXPECT_EQ(line_of(run({{"audit", "true"}, {"parallel.strategy", "ddp"}})), "");
  for (const char* rate :
       {"rates.gflops", "rates.memory_gbs", "rates.link_gbs", "rates.link_latency_us"}) {
    EXPECT_TRUE(has(run({{rate, "1"}}).err,
                    {std::string(rate) + " with plan, audit or memory_budget only"}));
  }
}

// Rank 1 holds more in one of them, all ranks send more in the other.
TEST_F(AuditCli, ARunThatIsNotAsPlannedEndsWithAnErrorOnceItIsSaved) {
  struct Case {
    const char *fault, *what, *rank;
  };
  for (const Case& c :
       {Case{"allocate", "  activation  ", "rank 1"}, Case{"send", "  bytes sent  ", "rank 0"}}) {
    const std::string model = folder_ / c.fault;
    const Flags flags = with({{"audit", "true"}, {"fault", c.fault}, {"save.final", model}});
    const Outcome outcome = testing::run_program(kBrokenTrainer, flags);
    EXPECT_EQ(outcome.exit_code, 1);
    const std::string end = fmt::format("step 2 is not as planned on {}\n", c.rank);
    EXPECT_TRUE(has(outcome.out, {end})) << outcome.out;
    EXPECT_TRUE(has(outcome.err, {"[audit] expected what was planned", "step 2 is not as planned",
                                  fmt::format("({})", c.rank)}));
    // The first of the lines that differ is of what was done wrong.
    const std::size_t differs = outcome.out.find("DIFFERS");
    const std::size_t line = outcome.out.rfind('\n', differs) + 1;
    EXPECT_EQ(outcome.out.compare(line, std::string(c.what).size(), c.what), 0) << outcome.out;
    EXPECT_TRUE(std::filesystem::exists(model + "/model.safetensors")) << c.fault;
    EXPECT_TRUE(final_record().contains("planned"));
    EXPECT_EQ(final_record().at("params_sha256").get<std::string>().size(), 64u);
  }
  const Outcome without =
      testing::run_program(kBrokenTrainer, with({{"fault", "send"}, {"audit", "false"}}));
  EXPECT_EQ(without.exit_code, 0) << without.err;
}

}  // namespace
}  // namespace tessera
