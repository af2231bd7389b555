// compare --find-divergence as a person runs it.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/io/file.h"
#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/tools/testing/tiny_training.h"
#include "tools/compare/comparison_folder.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class FindDivergence : public TinyTraining {
 protected:
  FindDivergence() { flags_["out"] = folder_ / "out"; }

  Outcome find(const std::vector<std::string>& pair, const Flags& more = {}) const {
    const bool trains =
        std::ranges::none_of(pair, [](const auto& a) { return a.starts_with('/'); });
    std::vector<std::string> arguments;
    Flags flags = trains ? with(more) : more;  // records are compared without a training
    flags["out"] = flags_.at("out");
    for (const auto& [name, value] : flags) arguments.push_back("--" + name + "=" + value);
    arguments.emplace_back("--find-divergence");
    arguments.insert(arguments.end(), pair.begin(), pair.end());
    return run_program("tools/compare/compare", arguments);
  }
  json result() const { return parse_json(folder_.read("out/divergence/divergence.json")); }
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
  EXPECT_TRUE(has(
      same.out, {"Nothing differs", "Options that differ: parallel.strategy (A ddp, B zero2)\n"}));
  EXPECT_EQ(result().at("options_that_differ"),
            parse_json(R"([{"option":"parallel.strategy","a":"\"ddp\"","b":"\"zero2\""}])"));
  const Outcome other = find({a, c});
  EXPECT_EQ(other.exit_code, 1);
  EXPECT_TRUE(
      has(other.out,
          {"First difference: step 2, micro-batch 1",
           "Options that differ: parallel.strategy (A ddp, B zero3); train.lr (A 0.004, B 0.5)\n",
           "Records store checksums only; give the two configurations to see values.\n",
           "largest 0.", "may have parted earlier", "steps that only A has"}));
  EXPECT_TRUE(result().at("first").at("values").is_null());
}

TEST_F(FindDivergence, RecordsOfOtherDataOrArithmeticAreToldApart) {
  const auto made = [&](const std::string& name, const std::string& gemm) {
    const Outcome outcome = run_program(
        kTransformer, with({{"out", folder_ / name}, {"log.probe", folder_ / (name + ".jsonl")}}),
        {{"TESSERA_CPU_GEMM", gemm}});
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  };
  made("a", "auto");
  made("b", "eigen");
  std::string text = folder_.read("text.txt");
  std::ranges::reverse(text);  // under the same path
  folder_.write("text.txt", text);
  made("c", "auto");
  const std::string a = folder_ / "a.jsonl", same = "All options of the training are the same.\n";
  const Outcome data = find({a, folder_ / "c.jsonl"});
  EXPECT_EQ(data.exit_code, 1);
  EXPECT_TRUE(has(data.out, {"The data differ, although their path is the same: A has 4015 tokens ",
                             same, "First difference: "}))
      << data.out;
  EXPECT_LT(data.out.find("The data differ"), data.out.find(same));
  EXPECT_EQ(data.out.find("The arithmetic differs"), std::string::npos) << data.out;
  EXPECT_NE(result().at("a").at("data_digest"), result().at("b").at("data_digest"));
  const Outcome arithmetic = find({a, folder_ / "b.jsonl"});
  EXPECT_TRUE(
      has(arithmetic.out, {"The arithmetic differs: cpu.gemm (A oneDNN ", "B Eigen ", same}))
      << arithmetic.out;
  EXPECT_EQ(arithmetic.out.find("The data differ"), std::string::npos) << arithmetic.out;
  // Older records say neither.
  const std::string record = folder_.read("a.jsonl");
  const std::size_t begin = record.find(",\"data_digest\""), end = record.find("}\n");
  folder_.write("old.jsonl", record.substr(0, begin) + record.substr(end));
  const Outcome old = find({a, folder_ / "old.jsonl"});
  EXPECT_EQ(old.exit_code, 0) << old.err;
  EXPECT_TRUE(has(old.out, {"The record of B does not say which data it was made with",
                            "The record of B does not say which arithmetic it was made with",
                            "Nothing differs: "}))
      << old.out;
}

TEST_F(FindDivergence, AnEarlierSearchIsReplaced) {
  const std::string out = folder_ / "out/divergence";
  const std::string mine = folder_ / "mine.json";
  EXPECT_EQ(find({"precision.param=f32", "precision.param=bf16"}, {{"log.trace", mine}}).exit_code,
            1);
  EXPECT_FALSE(fs::exists(mine)) << "each training has a trace of its own";
  const std::vector<std::string> files = {"/a/values.jsonl",      "/a/values.txt",
                                          "/a/values.trace.json", "/b/values.jsonl",
                                          "/a/probe.trace.json",  "/b/probe.trace.json"};
  for (const std::string& file : files) EXPECT_TRUE(fs::exists(out + file)) << file;
  EXPECT_EQ(find({"ddp", "zero2"}).exit_code, 0);
  for (const std::string& file : files) EXPECT_FALSE(fs::exists(out + file)) << file;
  // What it left may be compared again.
  EXPECT_EQ(find({out + "/a/probe.jsonl", out + "/b"}).exit_code, 0);
  EXPECT_TRUE(fs::exists(out + "/a/probe.jsonl"));
  EXPECT_EQ(find({folder_ / "nothing.jsonl", folder_ / "nothing.jsonl"}).exit_code, 1);
  EXPECT_FALSE(fs::exists(out + "/divergence.json")) << "of the search before";
}

TEST_F(FindDivergence, OneSearchAloneIsInAFolder) {
  const std::string out = folder_ / "out/divergence";
  fs::create_directories(out);
  const engine::FileDescriptor lock = tools::lock_folder(out);
  const Outcome outcome = find({"ddp", "zero3"});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err, {"expected one run at a time", out}));
  EXPECT_FALSE(fs::exists(out + "/a"));
}

TEST_F(FindDivergence, DataMayBeNamedInSeveralWays) {
  const fs::path data = flags_.at("data.path");
  const std::string a = record("a");
  const std::string b = record("b", {{"data.path", data.parent_path() / "." / data.filename()}});
  const Outcome same = find({a, b});
  EXPECT_EQ(same.exit_code, 0) << same.err;
}

// The update of step 1 is infinite, and so is what forward of step 2 computes with.
TEST_F(FindDivergence, TheStepThatGoesWrongIsCompared) {
  Flags flags{{"train.lr", "1e30"}, {"train.schedule", "constant"}, {"log.probe_steps", "2:3"}};
  flags["out"] = folder_ / "bad";
  flags["log.probe"] = folder_ / "bad.jsonl";
  EXPECT_EQ(run(flags).exit_code, 1);
  const std::string good = record("good", {{"log.probe_steps", "2:3"}});
  const Outcome outcome = find({good, folder_ / "bad.jsonl"});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.out, {"First difference: step 2, micro-batch 1", "gathered parameter",
                                "B went wrong in step 2, and has a part of it"}))
      << outcome.out << outcome.err;
  // What is not a number has the bits that it has.
  const std::string bad = folder_.read("bad.jsonl");
  ASSERT_TRUE(has(bad, {R"("max_abs":null)"}));
  const Outcome same = find({folder_ / "bad.jsonl", folder_.write("again.jsonl", bad)});
  EXPECT_EQ(same.exit_code, 0) << same.out << same.err;
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
  refused({"ddp", "out=elsewhere"}, "which says what is written");
  refused({"ddp", folder_ / "nothing.jsonl"}, "got one of each");
  refused({folder_ / "nothing.jsonl", folder_ / "nothing.jsonl"}, "nothing.jsonl");
  const Outcome trained = run_program(
      "tools/compare/compare", std::vector<std::string>{"--find-divergence", folder_ / "a.jsonl",
                                                        folder_ / "b.jsonl", "--train.lr=1"});
  EXPECT_TRUE(has(trained.err, {"expected two records alone, got --train.lr as well"}));
  refused({"ddp", "zero3"}, "expected two configurations alone, got sweep as well",
          {{"sweep", "parallel.prefetch=0,1"}});
  refused({"ddp", "zero3"}, "log.probe_steps", {{"log.probe_steps", "2:9"}});
  refused({"ddp", "zero3"}, "expected neither log.probe nor log.probe_values",
          {{"log.probe", folder_ / "mine"}});
  refused({"ddp", "zero3"}, "[trainer] expected a program", {{"trainer", folder_ / "nothing"}});
}

TEST_F(FindDivergence, AnInputIsNeitherReplacedNorRemoved) {
  const std::string out = folder_ / "out/divergence";
  fs::create_directories(out + "/a");
  const std::string text = folder_.read("text.txt");
  const auto refused = [&](const std::vector<std::string>& pair, const Flags& more,
                           const std::string& words, const std::string& name,
                           const std::string& bytes) {
    const Outcome outcome = find(pair, more);
    EXPECT_EQ(outcome.exit_code, 1) << name;
    EXPECT_TRUE(has(outcome.err, {words})) << outcome.err;
    EXPECT_EQ(folder_.read("out/divergence/" + name), bytes);
    fs::remove(out + "/" + name);
  };
  const std::string data = "[config] expected data.path to name no file of the search";
  for (const std::string name : {"a/probe.jsonl", "a/log.jsonl", "mine.txt"}) {
    folder_.write("out/divergence/" + name, text);
    const Flags as_bytes = {{"data.path", out + "/" + name}, {"data.format", "bytes"}};
    refused({"ddp", "zero3"}, as_bytes, data, name, text);
    fs::create_hard_link(flags_.at("data.path"), out + "/" + name);
    refused({"ddp", "zero3"}, {}, data, name, text);
    fs::create_symlink(flags_.at("data.path"), out + "/" + name);
    refused({"ddp", "zero3"}, {}, data, name, text);
  }
  fs::remove(out + "/a");
  fs::create_directory_symlink(folder_ / "r", out + "/a");
  fs::create_directory(folder_ / "r");
  const std::string elsewhere = folder_.write("r/probe.jsonl", text);
  refused({"ddp", "zero3"}, {{"data.path", elsewhere}, {"data.format", "bytes"}}, data,
          "a/probe.jsonl", text);
  fs::remove(out + "/a");
  const std::string json = "divergence.json", bytes = "train.lr = 0.01\n";
  folder_.write("out/divergence/" + json, text);
  refused({"ddp", "zero3"}, {{"data.path", out + "/" + json}}, "expected out and data.path", json,
          text);
  folder_.write("out/divergence/" + json, bytes);
  refused({"ddp", "zero3"}, {{"config", out + "/" + json}}, "expected out and config", json, bytes);
  const std::string path = record("r") + "/probe.jsonl", lines = folder_.read("r/probe.jsonl");
  folder_.write("out/divergence/" + json, bytes);
  refused({path, path}, {{"config", out + "/" + json}}, "got --config as well", json, bytes);
  folder_.write("out/divergence/" + json, lines);
  refused({out + "/" + json, path}, {}, "[config] expected out and find_divergence", json, lines);
  fs::create_symlink(path, out + "/" + json);
  refused({path, path}, {}, "[config] expected out and find_divergence", json, lines);
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
      const json line = parse_json(log.substr(begin, end - begin));
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
                                                  {"log.peak_ms", "0"},
                                                  {"device", "cpu"},
                                                  {"out", folder_ / "mlp"},
                                                  {"log.probe", path}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has(outcome.out, {"probe " + path, " checksums of steps 1 to 2"}));
  EXPECT_EQ(find({path, path}).exit_code, 0);
}

TEST_F(FindDivergence, AFullDiskUnderTheRecordCostsARunNothingElse) {
  const std::string path = folder_.write("p.jsonl", "older");
  const Outcome outcome =
      shell("trap '' XFSZ; ulimit -f 64; exec " + command({{"log.probe", path}}));
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err, {"p.jsonl", "the training goes on without\n", "error: "}));
  EXPECT_TRUE(has(outcome.out, {"parameters sha256 "}));
  EXPECT_EQ(outcome.out.find("probe "), std::string::npos) << "no file that is not there";
  EXPECT_TRUE(has(folder_.read("out/log.jsonl"), {"\"params_sha256\""}));
  EXPECT_EQ(folder_.read("p.jsonl"), "older");
}

TEST_F(FindDivergence, ARunThatEndsBeforeTheStepsOfTheRecordLeavesAnOlderOne) {
  const std::string path = folder_.write("p.jsonl", "older");
  const std::string log = folder_ / "out/log.jsonl";
  const Outcome outcome = shell(
      command(
          {{"train.steps", "1000000"}, {"log.probe_steps", "900000:900001"}, {"log.probe", path}}) +
      " & pid=$!; for i in $(seq 600); do grep -q loss " + log +
      " 2> /dev/null && break; sleep 0.1; done; kill -TERM $pid; wait $pid");
  EXPECT_TRUE(has(outcome.out, {"probe " + path +
                                ": not written, as the run ended before the end "
                                "of step 900000\n"}));
  EXPECT_EQ(folder_.read("p.jsonl"), "older");
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
