// compare --find-divergence as a person runs it.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/program.h"
#include "tests/tools/train/tiny_training.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class FindDivergence : public TinyTraining {
 protected:
  FindDivergence() { flags_["out"] = folder_ / "out"; }

  Outcome find(const std::vector<std::string>& pair, const Flags& more = {}) const {
    std::vector<std::string> arguments;
    for (const auto& [name, value] : with(more)) arguments.push_back("--" + name + "=" + value);
    arguments.emplace_back("--find-divergence");
    arguments.insert(arguments.end(), pair.begin(), pair.end());
    return run_program("tools/compare/compare", arguments);
  }
  json result() const { return json::parse(folder_.read("out/divergence/divergence.json")); }
  /// A record of train_transformer.
  std::string record(const std::string& name, const Flags& more = {}) const {
    Flags flags = more;
    const std::string folder = folder_ / name;
    flags["out"] = folder;
    flags["log.probe"] = folder + "/probe.jsonl";
    fs::create_directories(folder);
    const Outcome outcome = run(flags);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return folder;
  }
};

TEST_F(FindDivergence, StrategiesHaveEqualChecksums) {
  const Outcome outcome = find({"ddp", "parallel.strategy=zero3 parallel.ranks=1 train.accum=2"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has(outcome.out, {"A: ddp (2 ranks x 1 micro-step)\n",
                                "B: zero3 ranks=1 train.accum=2 (1 rank x 2 micro-steps)\n",
                                "Nothing differs: ", " checksums of steps 1 to 3 are equal."}));
  EXPECT_EQ(outcome.out.find("Not compared"), std::string::npos);
  const json all = result();
  EXPECT_TRUE(all.at("first").is_null());
  EXPECT_EQ(all.at("num_differing"), 0);
  EXPECT_GT(all.at("num_compared"), 500);
}

TEST_F(FindDivergence, NamesWhatAnotherDtypeChangesFirst) {
  const Outcome outcome = find({"precision.param=f32", "precision.param=bf16"});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.out,
                  {"First difference: step 1, micro-batch 1 (A: rank 0, micro-step 1; B: rank 0,",
                   "micro-step 1), gathered parameter (forward)\n",
                   "unit root, tensor wte.weight, shape (256, 8)\n", " of 2,048 elements differ, ",
                   "A: f32, unit root", "B: bf16, unit root", "0 checksums before it are equal"}));
  EXPECT_TRUE(has(outcome.err, {"[divergence] expected A and B to compute the same"}));
  const json first = result().at("first");
  EXPECT_EQ(first.at("step"), 1);
  EXPECT_EQ(first.at("micro_batch"), 1);
  EXPECT_EQ(first.at("phase"), "gathered_forward");
  EXPECT_EQ(first.at("a").at("rank"), 0);
  EXPECT_EQ(first.at("shape"), json({256, 8}));
  EXPECT_GT(first.at("values").at("num_differing"), 1000);
  EXPECT_GT(first.at("values").at("max_abs_difference"), 0);
}

TEST_F(FindDivergence, NamesTheFirstPhaseThatAnOptionReaches) {
  const auto phase_of = [&](const std::string& option) {
    EXPECT_EQ(find({"", option}).exit_code, 1) << option;
    const json all = result();
    EXPECT_TRUE(all.at("remark").is_null()) << all.at("remark");
    return all.at("first").is_null() ? "none" : all.at("first").at("phase").get<std::string>();
  };
  EXPECT_EQ(phase_of("precision.accumulate=bf16 precision.reduce=bf16"), "gradient");
  EXPECT_EQ(phase_of("comm.hook=bf16"), "reduced");
  EXPECT_EQ(phase_of("train.lr=0.5"), "updated");
  EXPECT_EQ(phase_of("train.beta2=0.5"), "updated");
}

TEST_F(FindDivergence, RecordsOfRunsAreCompared) {
  const std::string a = record("a", {{"parallel.strategy", "ddp"}});
  const std::string b = record("b", {{"parallel.strategy", "zero2"}});
  const std::string c = record("c", {{"train.lr", "0.5"}, {"log.probe_steps", "2:3"}});
  const Outcome same = find({a, b + "/probe.jsonl"});
  EXPECT_EQ(same.exit_code, 0) << same.err;
  EXPECT_TRUE(has(same.out, {"Nothing differs"}));
  const Outcome other = find({a, c});
  EXPECT_EQ(other.exit_code, 1);
  EXPECT_TRUE(has(other.out, {"First difference: step 2, micro-batch 1", "Records hold no values",
                              "largest 0.", "may have parted earlier", "steps that only A has"}));
  EXPECT_TRUE(result().at("first").at("values").is_null());
}

TEST_F(FindDivergence, ATrainingThatEndsInAnErrorIsComparedUpToThere) {
  const Outcome outcome = find({"train.grad_clip=1", "train.lr=1e30"}, {{"train.steps", "6"}});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.out, {"it ended early: exit code 1; see ", "First difference: step 1, ",
                                "parameter after the update"}));
}

TEST_F(FindDivergence, WhatCannotBeIsAnErrorBeforeAnythingIsTrained) {
  const auto refused = [&](const std::vector<std::string>& pair, const std::string& words,
                           const Flags& more = {}) {
    const Outcome outcome = find(pair, more);
    EXPECT_EQ(outcome.exit_code, 1) << words;
    EXPECT_TRUE(has(outcome.err, {words}));
    EXPECT_EQ(outcome.out, "");
    EXPECT_FALSE(fs::exists(folder_ / "out/divergence/a"));
  };
  refused({}, "[find-divergence] expected two configurations or two records");
  refused({"ddp"}, "got only ddp");
  refused({"ddp", "zero4"}, "configuration zero4");
  refused({"ddp", "parallel.prefech=1"}, "did you mean parallel.prefetch?");
  refused({"ddp", "train.seed=1 train.seed=2"}, "expected each option once, got train.seed twice");
  refused({"ddp", "train.seed=2"}, "(train.seed)");
  refused({"ddp", "model.layers=1"}, "got 2 in A and 1 in B (model.layers)");
  refused({"ddp", "out=elsewhere"}, "which names what is written");
  refused({"ddp", folder_ / "nothing.jsonl"}, "got one of each");
  refused({folder_ / "nothing.jsonl", folder_ / "nothing.jsonl"}, "nothing.jsonl");
  refused({"ddp", "zero3"}, "expected two configurations alone, got sweep as well",
          {{"sweep", "parallel.prefetch=0,1"}});
  refused({"ddp", "zero3"}, "log.probe_steps", {{"log.probe_steps", "2:9"}});
  refused({"ddp", "zero3"}, "expected neither log.probe nor log.probe_values",
          {{"log.probe", folder_ / "mine"}});
  refused({"ddp", "zero3"}, "[trainer] expected a program", {{"trainer", folder_ / "nothing"}});
}

TEST_F(FindDivergence, ARecordThatIsCutShortIsRefusedByItsName) {
  const std::string path = record("a") + "/probe.jsonl";
  const std::string text = folder_.read("a/probe.jsonl");
  const auto refused = [&](const std::string& bytes, const std::string& words) {
    folder_.write("b.jsonl", bytes);
    const Outcome outcome = find({path, folder_ / "b.jsonl"});
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(has(outcome.err, {"b.jsonl", words}));
  };
  refused(text.substr(0, text.size() / 2), "half a line");
  refused(text.substr(0, text.rfind("{\"end\"")), "cut short");
  refused("", "cut short, or none");
  refused("{\"step\":1,\"loss\":2}\n", "expected a record of --log.probe, got none");
  refused(text + "{}\n", "got more");
}

// The trainers
// ------------------------------------------------------------------------------------

TEST_F(FindDivergence, AProbeChangesNothingThatARunTells) {
  const auto end_of = [&](const std::string& name) {
    const std::string log = folder_.read(name + "/log.jsonl");
    std::vector<json> steps;
    for (std::size_t begin = 0; begin < log.size();) {
      const std::size_t end = log.find('\n', begin);
      const json line = json::parse(log.substr(begin, end - begin));
      begin = end + 1;
      json kept;
      for (const char* key : {"loss", "grad_norm", "peak_bytes", "sent_bytes", "num_collectives"}) {
        if (line.contains(key)) kept[key] = line[key];
      }
      if (line.contains("final")) kept = line["final"]["params_sha256"];
      steps.push_back(std::move(kept));
    }
    return steps;
  };
  for (const char* strategy : {"ddp", "zero3"}) {
    record("on", {{"parallel.strategy", strategy}, {"audit", "true"}});
    EXPECT_EQ(run({{"out", folder_ / "off"}, {"parallel.strategy", strategy}}).exit_code, 0);
    EXPECT_EQ(end_of("on"), end_of("off")) << strategy;
    EXPECT_EQ(end_of("on").size(), 4u);
  }
}

TEST_F(FindDivergence, TheMlpRecordsToo) {
  const std::string path = folder_ / "probe.jsonl";
  const Outcome outcome = run_program(kMlp, Flags{{"train.steps", "2"},
                                                  {"parallel.ranks", "2"},
                                                  {"log.every", "0"},
                                                  {"device", "cpu"},
                                                  {"out", folder_ / "mlp"},
                                                  {"log.probe", path}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has(outcome.out, {"probe " + path, " checksums of steps 1 to 2"}));
  EXPECT_EQ(find({path, path}).exit_code, 0);
}

TEST_F(FindDivergence, OptionsOfTheProbeAreChecked) {
  const auto refused = [&](const Flags& flags, const std::string& words) {
    const Outcome outcome = run(flags);
    EXPECT_EQ(outcome.exit_code, 1) << words;
    EXPECT_TRUE(has(outcome.err, {words}));
  };
  const std::string path = folder_ / "p.jsonl";
  refused({{"log.probe_steps", "1:2"}}, "expected log.probe_steps with log.probe only");
  refused({{"log.probe", path}, {"log.probe_steps", "0:2"}}, "(log.probe_steps)");
  refused({{"log.probe", path}, {"log.probe_values", "x"}}, "PHASE:MICRO_BATCH:VISIT:TENSOR");
  refused({{"log.probe", path}, {"log.probe_values", "x:1:1:wte.weight"}}, "expected a phase of");
  refused({{"log.probe", path}, {"log.probe_values", "gradient:1:1:nothing"}},
          "got none of 'gradient:1:1:nothing' (log.probe_values)");
  refused({{"log.probe", "/nowhere/p.jsonl"}}, "/nowhere/p.jsonl");
  refused({{"log.probe", folder_ / "text.txt"}}, "text.txt");
  EXPECT_FALSE(fs::exists(path));
}

}  // namespace
}  // namespace tessera::testing
