// --plan and --memory_budget of the trainers, and the program plan, as a person meets them.
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>
#include <string>

#include "engine/io/text.h"
#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/tools/testing/tiny_training.h"

namespace tessera {
namespace {

using nlohmann::json;
using testing::Flags;
using testing::has;
using testing::Outcome;

const std::string kPlan = "tools/programs/plan";

class PlanCli : public testing::TinyTraining {
 protected:
  bool has_run() const { return exists("run"); }
};

TEST_F(PlanCli, SaysWhatAStepWouldDoAndMakesNothing) {
  const Outcome outcome = run({{"plan", "true"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has(outcome.out, {"plan ", "memory of a step", "optimizer", "states x 4 B x",
                                "all_gather", "h.1 forward", "reduce_scatter", "GFLOP/s"}));
  EXPECT_FALSE(has_run());
}

TEST_F(PlanCli, IsTheSameFromTheProgramThatNeedsNoData) {
  const Outcome trainer = run({{"plan", "true"}});
  Flags flags = flags_;
  flags.erase("data.path");
  flags["model.vocab"] = "256";
  const Outcome plan = testing::run_program(kPlan, flags);
  EXPECT_EQ(plan.exit_code, 0) << plan.err;
  const auto upto_times = [](const std::string& text) {
    return text.substr(0, text.find("a step has "));
  };
  EXPECT_EQ(upto_times(plan.out), upto_times(trainer.out));
  // Ranks agree on what is planned, by its hash.
  const std::string hash = plan.out.substr(0, std::string("plan 0123456789abcdef").size());
  EXPECT_TRUE(has(run({{"out", folder_ / "other"}}).out, {hash + ": 3 units, zero3 on 2 ranks"}));
  flags["json"] = "true";
  const auto record = testing::parse_json(testing::run_program(kPlan, flags).out);
  EXPECT_EQ("plan " + record.at("hash").get<std::string>(), hash);
  EXPECT_GT(record.at("sent_bytes").get<std::int64_t>(), 0);
  EXPECT_GT(record.at("host_ms").get<double>(), 0);
  EXPECT_GT(record.at("num_launches").get<std::int64_t>(), record.at("num_collectives"));
  EXPECT_FALSE(has_run());
}

TEST_F(PlanCli, IsTheSameFromTheProgramThatNeedsNoDataWithEachChoiceOfTheCpu) {
  flags_["precision.param"] = "bf16";
  flags_["plan"] = "true";
  Flags flags = flags_;
  flags.erase("data.path");
  flags.erase("plan");
  flags["model.vocab"] = "256";
  for (const auto& [key, value] :
       Flags{{"cpu.isa", "v2"}, {"cpu.gemm", "eigen"}, {"cpu.threads_per_rank", "3"}}) {
    const Outcome trainer = run({{key, value}});
    Flags chosen = flags;
    chosen[key] = value;
    const Outcome plan = testing::run_program(kPlan, chosen);
    EXPECT_EQ(plan.exit_code, 0) << plan.err;
    const auto upto_times = [](const std::string& text) {
      return text.substr(0, text.find("a step has "));
    };
    EXPECT_EQ(upto_times(plan.out), upto_times(trainer.out)) << key;
  }
  flags["cpu.isa"] = "v9";
  EXPECT_EQ(testing::run_program(kPlan, flags).exit_code, 1);
}

// By hand, of 8,030,261,248 parameters. Each unit is padded by less than a thousandth.
TEST_F(PlanCli, PlansALargeModelOnHundredsOfRanks) {
  constexpr std::int64_t kLayers = 32, kDim = 4096, kOfHead = 128, kMlp = 14'336, kVocab = 128'256;
  constexpr std::int64_t kBlock =
      2 * kDim * kDim + 2 * 8 * kOfHead * kDim + 3 * kDim * kMlp + 2 * kDim;
  constexpr std::int64_t kRoot = 2 * kVocab * kDim + kDim;
  const auto expect_padded = [](std::int64_t got, std::int64_t exact, const char* what) {
    EXPECT_GE(got, exact) << what;
    EXPECT_LE(got, exact + exact / 1000) << what;
  };
  for (const std::int64_t ranks : {8, 64, 512}) {
    SCOPED_TRACE(ranks);
    const Outcome outcome =
        testing::run_program(kPlan, Flags{{"device", "cpu"},
                                          {"json", "true"},
                                          {"model.preset", "llama3-8b"},
                                          {"train.batch", "1"},
                                          {"parallel.ranks", std::to_string(ranks)}});
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    const json plan = testing::parse_json(outcome.out), &peak = plan.at("peak_bytes");
    const std::int64_t shard = peak.at("parameter_shard");
    expect_padded(ranks * shard, 4 * (kLayers * kBlock + kRoot), "shards of all ranks");
    EXPECT_EQ(peak.at("optimizer"), 2 * shard);
    expect_padded(peak.at("gathered_parameter"), 4 * (2 * kBlock + kRoot), "2 slots and the root");
    expect_padded(peak.at("gradient"), 4 * (2 * kBlock + kRoot) + shard, "2 slots, root, sums");
    // Blocks are gathered in both directions, but for the last, which is kept, and the root once;
    // all are reduced. Besides, a norm and what a step tells.
    EXPECT_EQ(plan.at("num_collectives"), 3 * kLayers - 1 + 2 + 2);
    expect_padded(plan.at("sent_bytes").get<std::int64_t>() / (ranks - 1) * ranks,
                  4 * ((3 * kLayers - 1) * kBlock + 2 * kRoot), "sent");
  }
}

TEST_F(PlanCli, DrawsWhatIsPlanned) {
  Flags flags = flags_;
  flags.erase("data.path");
  flags["model.vocab"] = "256";
  flags["json"] = "true";
  const std::string path = folder_ / "plan.trace.json";
  const auto plan = testing::parse_json(testing::run_program(kPlan, flags).out);
  flags["log.trace"] = path;
  const Outcome outcome = testing::run_program(kPlan, flags);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  std::int64_t most = 0, num_collectives = 0;
  double begin_us = 0;
  std::set<std::string> names;
  for (const json& event : testing::parse_json(folder_.read("plan.trace.json"))) {
    const std::string name = event.at("name");
    if (name == "memory total")
      most = std::max(most, event.at("args").at("bytes").get<std::int64_t>());
    if (event.at("ph") != "X") continue;
    names.insert(name);
    if (name == "step 2") begin_us = event.at("ts");
    if (event.value("cat", "") == "gradients") ++num_collectives;
  }
  EXPECT_EQ(most, plan.at("peak_bytes").at("total").get<std::int64_t>());
  EXPECT_TRUE(names.contains("step 1") && names.contains("step 2"));
  EXPECT_TRUE(names.contains("all_gather h.1 forward"));
  EXPECT_GT(begin_us, 0);
  EXPECT_EQ(num_collectives, 2 * 3) << "of two blocks and the root, in both steps";
  flags["log.trace"] = folder_ / "nowhere/plan.json";
  EXPECT_TRUE(has(testing::run_program(kPlan, flags).err, {"nowhere/plan.json"}));
  // As a trainer does that only plans.
  const std::string drawn = folder_.read("plan.trace.json");
  const Outcome trainer = run({{"plan", "true"}, {"log.trace", folder_ / "trainer.trace.json"}});
  EXPECT_EQ(trainer.exit_code, 0) << trainer.err;
  EXPECT_EQ(folder_.read("trainer.trace.json"), drawn);
  const Outcome nowhere = run({{"plan", "true"}, {"log.trace", folder_ / "nowhere/plan.json"}});
  EXPECT_EQ(nowhere.exit_code, 1);
  EXPECT_TRUE(has(nowhere.err, {"nowhere/plan.json"}));
  EXPECT_EQ(nowhere.out, "");
}

// What a run would write, and which steps of it.
TEST_F(PlanCli, RefusesWhatOnlyStepsThatAreMadeHave) {
  const std::string drawn = folder_ / "plan.trace.json";
  const std::map<std::string, std::string> options = {{"log.jsonl", folder_ / "log.jsonl"},
                                                      {"log.trace_steps", "1:2"},
                                                      {"log.probe", folder_ / "probe"},
                                                      {"log.probe_steps", "1:2"},
                                                      {"log.probe_values", "loss:0:0:x"},
                                                      {"log.tensorboard", folder_ / "board"},
                                                      {"audit", "true"}};
  for (const auto& [name, value] : options) {
    Flags flags = flags_;
    flags["log.trace"] = drawn;
    flags[name] = value;
    flags["plan"] = "true";
    for (const std::string& program : {testing::kTransformer, kPlan}) {
      const Outcome outcome = testing::run_program(program, flags);
      EXPECT_EQ(outcome.exit_code, 1) << name << outcome.out;
      EXPECT_TRUE(has(outcome.err, {"expected " + name + " without plan only"})) << outcome.err;
      EXPECT_EQ(outcome.out, "");
      flags.erase("plan");  // of the other one it is the purpose
    }
  }
  EXPECT_FALSE(std::filesystem::exists(drawn));
  // A file lists the options of a run, which may be planned.
  const std::string file =
      folder_.write("run.toml", "[log]\njsonl = \"log.jsonl\"\ntensorboard = \"board\"\n");
  const Outcome outcome = run({{"plan", "true"}, {"config", file}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
}

TEST_F(PlanCli, DrawsOverNothingThatItReads) {
  const std::string text = "[model]\nvocab = 256\n";
  const std::string file = folder_.write("plan.toml", text);
  Flags flags = flags_;
  flags["config"] = flags["log.trace"] = file;
  const Outcome outcome = testing::run_program(kPlan, flags);
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err, {"log.trace and config", "different files"})) << outcome.err;
  EXPECT_EQ(folder_.read("plan.toml"), text);
  flags.erase("config");
  flags["log.trace"] = flags.at("data.path");
  const std::string book = folder_.read("text.txt");
  const Outcome data = testing::run_program(kPlan, flags);
  EXPECT_EQ(data.exit_code, 1);
  EXPECT_TRUE(has(data.err, {"log.trace and data.path", "different files"})) << data.err;
  EXPECT_EQ(folder_.read("text.txt"), book);
}

TEST_F(PlanCli, DrawsOverNoFileOfTheTraining) {
  Flags flags = flags_;
  flags.erase("data.path");
  flags["model.vocab"] = "256";
  flags["save.final"] = folder_ / "saved";
  for (const char* folder : {"run", "saved"}) {
    std::filesystem::create_directory(folder_ / folder);
  }
  const std::map<std::string, std::string> files = {{"run/.lock", "the lock of out"},
                                                    {"run/log.jsonl", "out"},
                                                    {"run/config.toml", "out"},
                                                    {"run/sample.txt", "out"},
                                                    {"run/comm_hook.txt", "out"},
                                                    {"run/flight.json", "out"},
                                                    {"run/gemm_algorithms.txt", "out"},
                                                    {"saved/config.json", "save.final"},
                                                    {"saved/model.safetensors", "save.final"}};
  for (const auto& [name, option] : files) {
    flags["log.trace"] = folder_ / name;
    for (const bool is_there : {false, true}) {
      if (is_there) folder_.write(name, "kept");
      const Outcome outcome = testing::run_program(kPlan, flags);
      EXPECT_EQ(outcome.exit_code, 1) << name << outcome.out;
      EXPECT_TRUE(has(outcome.err, {"log.trace and " + option + " to name different files"}))
          << outcome.err;
      EXPECT_EQ(std::filesystem::exists(folder_ / name), is_there);
      EXPECT_EQ(is_there ? folder_.read(name) : "kept", "kept");
    }
  }
}

// The command line of a training says what its plan is, whatever else it asks for.
TEST_F(PlanCli, TakesWhatATrainingTakesAndReadsAndWritesNothing) {
  Flags flags = flags_;
  flags.erase("data.path");
  flags["model.vocab"] = "256";
  flags["json"] = "true";
  const auto plan = [&] {
    const Outcome outcome = testing::run_program(kPlan, flags);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    json record = testing::parse_json(outcome.out);
    record.erase("host_ms");
    return record;
  };
  const json alone = plan();
  for (const auto& [name, value] : Flags{{"resume", folder_ / "none"},
                                         {"checkpoint.every", "1"},
                                         {"checkpoint.dir", folder_ / "checkpoints"},
                                         {"save.final", folder_ / "saved"},
                                         {"sample.tokens", "7"},
                                         {"data.path", folder_ / "no.txt"},
                                         {"data.order", "sequential"},
                                         {"train.lr", "0.5"},
                                         {"train.max_minutes", "1"},
                                         {"log.every", "1"},
                                         {"log.val_every", "1"},
                                         {"log.val_prompts", folder_ / "none.txt"},
                                         {"log.peak_ms", "1"},
                                         {"plan", "true"}}) {
    flags[name] = value;
  }
  EXPECT_EQ(plan(), alone);
  EXPECT_FALSE(has_run());
  for (const char* made : {"none", "checkpoints", "saved"}) {
    EXPECT_FALSE(std::filesystem::exists(folder_ / made)) << made;
  }
  EXPECT_TRUE(has(shell(kPlan + " --help").out, {"Takes the command line of a training as it is"}));
  flags["plan"] = "false";
  const Outcome trains = testing::run_program(kPlan, flags);
  EXPECT_EQ(trains.exit_code, 1);
  EXPECT_TRUE(has(trains.err, {"expected no plan=false of a program that only plans"}));
}

// Ranks that meet at every collective, with next to nothing to compute between them.
TEST_F(PlanCli, ARunSaysWhatToTryNext) {
  const Outcome outcome = run(
      {{"train.steps", "12"}, {"parallel.prefetch", "0"}, {"parallel.reductions_in_flight", "0"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  // Of what there is to say most depends on how busy the machine is.
  EXPECT_TRUE(has(outcome.out, {"\n  next    "})) << outcome.out;
}

// Before anything is made.
TEST_F(PlanCli, RefusesWhatItsRanksCannotBe) {
  for (const char* strategy : {"hsdp", "hybrid_zero2", "hfsdp"}) {
    Flags flags = {{"parallel.strategy", strategy},
                   {"parallel.shard_ranks", "2"},
                   {"comm.hook", "powersgd"},
                   {"powersgd.across_replicas", "true"}};
    const Outcome refused = run(flags);
    EXPECT_EQ(refused.exit_code, 1);
    EXPECT_TRUE(has(refused.err, {"[config] expected powersgd.across_replicas with more than one",
                                  "all 2 ranks", strategy}))
        << refused.err;
    EXPECT_FALSE(has_run());
    flags["parallel.shard_ranks"] = "1";
    flags["plan"] = "true";
    EXPECT_EQ(run(flags).exit_code, 0) << strategy;
  }
  EXPECT_TRUE(has(run({{"parallel.strategy", "hsdp"}, {"parallel.shard_ranks", "3"}}).err,
                  {"parallel.shard_ranks that divides 2 ranks, got 3"}));
  EXPECT_TRUE(has(
      run({{"parallel.strategy", "hsdp"}, {"parallel.shard_ranks", "3"}, {"parallel.ranks", "1"}})
          .err,
      {"parallel.shard_ranks that divides 1 rank, got 3"}));
  EXPECT_FALSE(has_run());
}

TEST_F(PlanCli, RefusesWhatWouldHaveNoEffect) {
  Flags flags = flags_;
  flags.erase("data.path");
  const auto refused = [&](const Flags& more, const std::string& words) {
    Flags all = more;
    all.insert(flags.begin(), flags.end());
    const Outcome outcome = testing::run_program(kPlan, all);
    EXPECT_EQ(outcome.exit_code, 1) << words;
    EXPECT_TRUE(has(outcome.err, {"[config] expected " + words}));
  };
  refused({{"cuda.attention", "wgmma"}}, "cuda.attention=wgmma on GPUs only");
  refused({{"cuda.tune_gemm", "false"}}, "cuda.tune_gemm on GPUs only");
  refused({{"parallel.strategy", "zero2"}, {"parallel.prefetch", "7"}}, "parallel.prefetch where");
}

// As `plan --rates.gflops=1e-300` once took 0.0 ms.
TEST_F(PlanCli, RefusesRatesAtWhichTimeCannotBeCounted) {
  Flags flags = flags_;
  flags.erase("data.path");
  for (const auto& [name, value] : Flags{{"rates.gflops", "1e-300"},
                                         {"rates.memory_gbs", "5e-324"},
                                         {"rates.link_gbs", "1e-10"},
                                         {"rates.link_latency_us", "1e308"}}) {
    Flags slow = flags;
    slow[name] = value;
    const Outcome refused = testing::run_program(kPlan, slow);
    EXPECT_EQ(refused.exit_code, 1) << name;
    EXPECT_TRUE(has(refused.err, {"a number in [", "\"" + value + "\"", "(--" + name + ")"}));
  }
  Flags sums = flags;
  sums["rates.link_latency_us"] = "1e12";
  EXPECT_EQ(testing::run_program(kPlan, sums).exit_code, 0);
  sums["train.accum"] = "2000";
  EXPECT_TRUE(has(testing::run_program(kPlan, sums).err,
                  {"less than 100000 days of simulated time", "rates are too low"}));
}

// As `plan | head` does, however much of the output the program keeps to itself.
TEST_F(PlanCli, AReaderThatHasGoneEndsItInSilence) {
  std::string plan = kPlan;
  for (const auto& [name, value] : with({{"model.vocab", "256"}})) {
    if (name != "data.path") plan += " --" + name + "=" + value;
  }
  const std::string no_reader = "mkfifo " + folder_ / "pipe" + "; exec 4<>" + folder_ / "pipe" +
                                " 5>" + folder_ / "pipe" + " 4<&-; ";
  const std::string help = testing::kTransformer + " --help";
  for (const std::string& command :
       {plan, plan + " --json", this->command({{"plan", "true"}}), help}) {
    for (const char* unbuffered : {"", "stdbuf -o0 "}) {
      std::filesystem::remove(folder_ / "pipe");
      const Outcome gone = shell(no_reader + unbuffered + command + " >&5");
      EXPECT_EQ(gone.exit_code, 128 + SIGPIPE) << unbuffered << command;
      EXPECT_EQ(gone.err, "") << unbuffered << command;
      const Outcome full = shell(unbuffered + command + " > /dev/full");
      EXPECT_EQ(full.exit_code, 1) << unbuffered << command;
      EXPECT_TRUE(has(full.err, {"error: "})) << unbuffered << command;
    }
  }
  // What is wrong besides is told.
  std::filesystem::remove(folder_ / "pipe");
  const Outcome wrong = shell(no_reader + kPlan + " --model.layerz=1 >&5");
  EXPECT_EQ(wrong.exit_code, 1);
  EXPECT_TRUE(has(wrong.err, {"model.layerz"}));
}

TEST_F(PlanCli, KeepsToABudget) {
  Flags flags = flags_;
  flags.erase("data.path");
  flags["model.vocab"] = "256";
  flags["json"] = "true";
  const auto peak =
      testing::parse_json(testing::run_program(kPlan, flags).out).at("peak_bytes").at("total");
  const std::string little_less = std::to_string(peak.get<std::int64_t>() - 1);
  const Outcome free = run();
  const std::string hash = final_record().at("params_sha256");
  const Outcome kept = run({{"memory_budget", little_less}, {"audit", "true"}});
  EXPECT_EQ(kept.exit_code, 0) << kept.err;
  EXPECT_TRUE(has(kept.out, {"memory budget", "s  too much  as asked", "s  chosen    ",
                             "steps are as planned"}));
  EXPECT_EQ(final_record().at("params_sha256"), hash);
  // The folder has what was chosen: without a budget it is the same training.
  flags["memory_budget"] = little_less;
  const json options =
      testing::parse_json(testing::run_program(kPlan, flags).out).at("memory_budget").at("options");
  ASSERT_FALSE(options.empty());
  const std::string config = folder_.read("run/config.toml");
  for (const auto& [name, value] : options.items()) {
    EXPECT_TRUE(has(config, {name.substr(name.find('.') + 1) + " = " + testing::json_text(value)}))
        << name;
  }
}

// The ladder, and what a training would be given to do the same.
TEST_F(PlanCli, SaysInJsonWhatABudgetChanged) {
  Flags flags = flags_;
  flags.erase("data.path");
  flags["model.vocab"] = "256";
  flags["json"] = "true";
  const auto plan_with = [&](const Flags& more) {
    Flags all = flags;
    for (const auto& [name, value] : more) all[name] = value;
    const Outcome outcome = testing::run_program(kPlan, all);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return testing::parse_json(outcome.out);
  };
  const json plain = plan_with({});
  EXPECT_FALSE(plain.contains("memory_budget"));
  const auto asked = plain.at("peak_bytes").at("total").get<std::int64_t>();
  const json same = plan_with({{"memory_budget", std::to_string(asked * 2)}});
  EXPECT_EQ(same.at("memory_budget").at("options"), json::object());
  EXPECT_EQ(same.at("memory_budget").at("num_plans"), 1);
  const std::int64_t budget = asked * 4 / 5;
  const json told = plan_with({{"memory_budget", std::to_string(budget)}});
  const json& ladder = told.at("memory_budget");
  EXPECT_EQ(ladder.at("bytes").get<std::int64_t>(), budget);
  const json& rungs = ladder.at("rungs");
  ASSERT_GE(rungs.size(), 2u);
  EXPECT_EQ(rungs[0].at("what"), "as asked");
  EXPECT_EQ(rungs[0].at("peak_bytes").get<std::int64_t>(), asked);
  EXPECT_EQ(rungs[0].at("step_ms"), plain.at("step_ms"));
  EXPECT_EQ(rungs.back().at("step_ms"), told.at("step_ms"));
  for (std::size_t i = 0; i < rungs.size(); ++i) {
    const bool fits = rungs[i].at("peak_bytes").get<std::int64_t>() <= budget;
    EXPECT_EQ(rungs[i].at("fits").get<bool>(), fits);
    EXPECT_EQ(fits, i > 0) << i;
    if (!fits) continue;
    EXPECT_GE(rungs[i].at("step_ms"), rungs.back().at("step_ms"));
  }
  // Asked for as it says, it is the same plan.
  Flags chosen;
  for (const auto& [name, value] : ladder.at("options").items()) {
    chosen[name] = value.is_string() ? value.get<std::string>() : testing::json_text(value);
  }
  const json again = plan_with(chosen);
  EXPECT_EQ(again.at("peak_bytes"), told.at("peak_bytes"));
  EXPECT_EQ(again.at("peak_bytes").at("total"), rungs.back().at("peak_bytes"));
}

TEST_F(PlanCli, RefusesBudgetsThatNothingMeets) {
  Flags no_data = flags_;
  no_data.erase("data.path");
  no_data["model.vocab"] = "256";
  no_data["memory_budget"] = "20kB";
  const Outcome planned = testing::run_program(kPlan, no_data);
  EXPECT_EQ(planned.exit_code, 1);
  EXPECT_TRUE(has(planned.err, {"[memory_budget]", "20,000", "as asked", "offload.optimizer=1"}));
  const Outcome tight = run({{"memory_budget", "20kB"}});
  EXPECT_EQ(tight.exit_code, 1);
  EXPECT_TRUE(has(tight.err, {"[memory_budget]", "20,000", "as asked", "offload.optimizer=1"}));
  // What is largest in the plan of the last rung.
  no_data.erase("memory_budget");
  no_data["json"] = "true";
  std::smatch rung;
  const std::regex last_rung("too much  ([^\n]+=[^\n]+)\n");
  ASSERT_TRUE(std::regex_search(planned.err, rung, last_rung)) << planned.err;
  std::istringstream options(rung[1].str());
  for (std::string option; std::getline(options, option, ',');) {
    option.erase(0, option.find_first_not_of(' '));
    no_data[option.substr(0, option.find('='))] = option.substr(option.find('=') + 1);
  }
  const json last = testing::parse_json(testing::run_program(kPlan, no_data).out);
  const auto by_bytes = [](const json& a, const json& b) { return a.at("bytes") < b.at("bytes"); };
  const json category = std::ranges::max(last.at("memory"), by_bytes);
  const json term = std::ranges::max(category.at("terms"), by_bytes);
  for (const std::string& error : {planned.err, tight.err}) {
    EXPECT_TRUE(has(error, {"the largest of the last, which needs most at " +
                                last.at("peak_at").get<std::string>() + ":",
                            "\n    " + category.at("category").get<std::string>(),
                            engine::with_commas(category.at("bytes").get<std::int64_t>()),
                            "B  = " + term.at("text").get<std::string>()}))
        << error;
  }
  for (const char* bad : {"a lot", "-1GiB", "0"}) {
    no_data["memory_budget"] = bad;
    no_data.erase("json");
    for (const Outcome& outcome :
         {run({{"memory_budget", bad}}), testing::run_program(kPlan, no_data)}) {
      EXPECT_EQ(outcome.exit_code, 1);
      EXPECT_TRUE(has(outcome.err, {"memory_budget", "40GiB", bad}));
    }
  }
  EXPECT_FALSE(has_run());
}

TEST_F(PlanCli, SaysWhatCrossesBetweenProcesses) {
  const auto plan = [](Flags flags) {
    flags.insert({{"parallel.ranks", "8"}, {"json", "true"}});
    const Outcome outcome = testing::run_program(kPlan, flags);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return testing::parse_json(outcome.out);
  };
  // Of a block in f32 with 8 x 24,832 parameters each of two processes has a half of what the other
  // gathers. Half of a gradient's sums go to the other process, and a quarter comes back, once for
  // four ranks.
  const json two = plan({{"parallel.processes", "2"}});
  EXPECT_EQ(two.at("processes"), 2);
  constexpr std::int64_t kBlock = 4 * 8 * 24'832;
  const json first = two.at("collectives").at(0), gradient = two.at("collectives").at(5);
  ASSERT_EQ(first.at("name"), "all_gather");
  EXPECT_EQ(first.at("bytes_between_processes"), kBlock / 2);
  ASSERT_EQ(gradient.at("name"), "reduce_scatter");
  EXPECT_EQ(gradient.at("bytes_between_processes"), kBlock / 2 + kBlock / 4);
  // Replicas of a process keep their gathers to themselves.
  const json hsdp = plan({{"parallel.processes", "2"}, {"parallel.strategy", "hsdp"}});
  const json gather = hsdp.at("collectives").at(0);
  EXPECT_EQ(hsdp.at("groups").at(gather.at("group").get<std::size_t>()), json({0, 1, 2, 3}));
  EXPECT_EQ(gather.at("bytes_between_processes"), 0);
  // Each rank a process: what a rank sends.
  const json each = plan({{"parallel.processes", "8"}});
  for (const json& c : each.at("collectives")) {
    EXPECT_EQ(c.at("bytes_between_processes"), c.at("sent_bytes")) << c;
  }

  const auto says = [](Flags flags) {
    flags["parallel.ranks"] = "8";
    const Outcome outcome = testing::run_program(kPlan, flags);
    return outcome.out + outcome.err;
  };
  EXPECT_TRUE(has(says({{"parallel.processes", "2"}}),
                  {"8 ranks in 2 processes on CPUs", "a process sends 3.8 MiB a step to others"}));
  EXPECT_TRUE(has(says({{"parallel.processes", "2"}, {"strategies", "all"}}),
                  {"8 ranks in 2 processes on CPUs", "to others  ", "to others: what a process"}));
  EXPECT_TRUE(has(says({{"parallel.processes", "3"}}), {"parallel.ranks in 3 equal processes"}));
  EXPECT_TRUE(has(says({{"parallel.processes", "2"}, {"device", "cuda"}}),
                  {"parallel.processes on CPUs, got device=cuda"}));
}

}  // namespace
}  // namespace tessera
