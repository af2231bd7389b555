// Traces of whole runs of the trainers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/tools/testing/tiny_images.h"
#include "tests/tools/testing/tiny_training.h"
#include "tests/tools/trace/trace_file.h"

namespace tessera::testing {
namespace {

using nlohmann::json;

class TraceOfARun : public TinyTraining {
 protected:
  TraceOfARun() {
    flags_["train.steps"] = "6";
    flags_["log.trace"] = path_;
  }
  /// The trace of a run that ends well.
  TraceFile trace(const Flags& more = {}) const {
    const Outcome outcome = run(more);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_EQ(outcome.err, "");
    return TraceFile(folder_.read("trace.json"));
  }
  std::vector<json> log() const {
    std::vector<json> records;
    std::istringstream lines(folder_.read("run/log.jsonl"));
    for (std::string line; std::getline(lines, line);) records.push_back(parse_json(line));
    return records;
  }

  const std::string path_ = folder_ / "trace.json";
};

std::set<std::string> steps_of(const TraceFile& file, int process) {
  std::set<std::string> names;
  for (const TraceSlice& s : file.of_thread("steps", process)) names.insert(s.name);
  return names;
}

TEST_F(TraceOfARun, ShowsTheStepsAskedForOnEveryRank) {
  const TraceFile file = trace({{"log.trace_steps", "2:4"}});
  EXPECT_EQ(file.processes, (std::map<int, std::string>{{1, "rank 0"}, {2, "rank 1"}}));
  file.expect_threads_in_turn();
  for (const int process : {1, 2}) {
    EXPECT_EQ(steps_of(file, process), (std::set<std::string>{"step 2", "step 3", "step 4"}));
    std::set<std::string> threads;
    for (const TraceSlice& s : file.slices) {
      if (s.process == process) threads.insert(file.threads.at(s.thread));
    }
    EXPECT_EQ(threads,
              (std::set<std::string>{"steps", "units", "compute", "gather", "reduce", "metrics"}));
    // Forward and backward of each unit in turn, three times.
    std::string units;
    for (const TraceSlice& s : file.of_thread("units", process)) units += s.name + ", ";
    const std::string step =
        "root forward, h.0 forward, h.1 forward, root forward, root backward, h.1 backward, "
        "h.0 backward, root backward, ";
    EXPECT_EQ(units, step + step + step);
    // What is computed lies in the steps.
    for (const TraceSlice& op : file.of_thread("compute", process)) {
      const auto steps = file.of_thread("steps", process);
      EXPECT_TRUE(std::ranges::any_of(steps, [&](const TraceSlice& s) {
        return s.begin_ns <= op.begin_ns && op.end_ns <= s.end_ns;
      })) << op.name;
    }
    // Parameters have names.
    const auto ops = file.of_thread("compute", process);
    EXPECT_TRUE(std::ranges::any_of(ops, [](const TraceSlice& s) {
      return s.name == "linear.backward_w h.1.mlp.c_fc.weight" && s.arg("unit") == "h.1" &&
             s.arg("phase") == "backward" && s.args.at("flops") > 0;
    }));
  }
}

TEST_F(TraceOfARun, LeadsFromGathersToUsesAndFromGradientsToReductions) {
  const TraceFile file = trace({{"log.trace_steps", "3:5"}});
  // In each step the first unit is gathered twice, the second, whose backward follows its forward,
  // and the root once. The first gathers of step 3 came with step 2: those of the root and of the
  // first unit.
  EXPECT_EQ(file.expect_gathers_lead_to_uses(), 2 * (3 * 4 - 2));
  std::map<std::string, int> gradients;
  for (const TraceFile::Arrow& arrow : file.arrows) {
    ASSERT_TRUE(arrow.from != nullptr && arrow.to != nullptr) << arrow.name;
    EXPECT_EQ(arrow.from->arg("unit"), arrow.to->arg("unit"));
    EXPECT_EQ(arrow.from->process, arrow.to->process);
    if (arrow.name != "gradient") continue;
    EXPECT_EQ(arrow.from->arg("phase"), "backward");
    EXPECT_EQ(arrow.to->arg("op"), "reduce_scatter");
    ++gradients[arrow.to->arg("unit")];
  }
  EXPECT_EQ(gradients, (std::map<std::string, int>{{"h.0", 6}, {"h.1", 6}, {"root", 6}}));
}

TEST_F(TraceOfARun, CountsMemoryAsTheLogDoes) {
  const TraceFile file = trace({{"offload.optimizer", "0.5"}, {"offload.threads", "1"}});
  std::map<std::string, std::int64_t> most, last;
  for (const TraceFile::Counter& c : file.counters) {
    if (c.process != 1) continue;
    most[c.name] = std::max(most[c.name], c.nbytes);
    last[c.name] = c.nbytes;
  }
  for (const json& record : log()) {
    if (record.contains("final")) continue;
    const std::string step = "step " + std::to_string(record.at("step").get<int>());
    for (const TraceSlice& s : file.of_thread("steps", 1)) {
      if (s.name != step) continue;
      EXPECT_EQ(s.args.at("peak_bytes").at("memory"), record.at("peak_bytes")) << step;
      EXPECT_EQ(s.args.at("peak_bytes").at("host memory"), record.at("host_peak_bytes")) << step;
    }
    if (step != "step 5") continue;
    for (const auto& [name, of] :
         {std::pair("memory", "peak_bytes"), {"host memory", "host_peak_bytes"}}) {
      for (const auto& [category, peak] : record.at(of).items()) {
        const std::int64_t seen = most[std::string(name) + " " + category];
        // Workspace of the CPU comes and goes inside a launch.
        const bool is_exact = category != "workspace" && category != "total";
        EXPECT_LE(seen, peak.get<std::int64_t>()) << name << " " << category;
        if (!is_exact) continue;
        EXPECT_EQ(seen, peak.get<std::int64_t>()) << name << " " << category;
      }
    }
  }
  EXPECT_GT(most["host memory optimizer"], 0);
  EXPECT_LT(last["memory activation"], most["memory activation"]) << "a step has ended";
  // All streams of the host and to it.
  std::set<std::string> threads;
  for (const auto& [id, name] : file.threads) threads.insert(name);
  for (const char* name : {"host", "up", "down"}) EXPECT_TRUE(threads.contains(name)) << name;
}

TEST_F(TraceOfARun, TellsTheOverlapInTheLogAndOnTheTerminal) {
  const Outcome outcome = run();
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const TraceFile file(folder_.read("trace.json"));
  const json final = log().back().at("final").at("trace");
  EXPECT_EQ(final.at("file"), path_);
  EXPECT_EQ(final.at("num_lost"), 0);
  ASSERT_EQ(final.at("steps").size(), 3u);
  for (const json& step : final.at("steps")) {
    double comm_ms = 0, exposed_ms = 0;
    const std::string name = "step " + std::to_string(step.at("step").get<int>());
    for (const TraceSlice& s : file.of_category("step")) {
      if (s.name != name) continue;
      comm_ms += s.args.at("comm_ms").get<double>() / 2;
      exposed_ms += s.args.at("exposed_ms").get<double>() / 2;
      EXPECT_GT(s.args.at("kinds").at("parameters").at("comm_ms"), 0) << name;
      EXPECT_GT(s.args.at("kinds").at("gradients").at("comm_ms"), 0) << name;
    }
    EXPECT_NEAR(step.at("comm_ms").get<double>(), comm_ms, 1e-9);
    EXPECT_NEAR(step.at("exposed_ms").get<double>(), exposed_ms, 1e-9);
    EXPECT_NEAR(step.at("hidden_ms").get<double>(), comm_ms - exposed_ms, 1e-9);
  }
  EXPECT_TRUE(has(outcome.out, {"trace " + path_ + ": communication ", " ms a step, ",
                                " ms of it hidden behind computation (", " ms exposed ("}));
}

TEST_F(TraceOfARun, ChangesNoBit) {
  std::set<json> digests;
  for (const char* path : {"", path_.c_str()}) {
    ASSERT_EQ(run({{"log.trace", path}}).exit_code, 0);
    digests.insert(log().back().at("final").at("params_sha256"));
  }
  EXPECT_EQ(digests.size(), 1u);
}

TEST_F(TraceOfARun, WorksWithEveryKindOfStep) {
  for (const Flags& more : std::vector<Flags>{
           {{"parallel.strategy", "ddp"},
            {"train.overlap_optimizer", "backward"},
            {"train.grad_clip", "0"}},
           {{"train.recompute", "true"}, {"train.accum", "2"}, {"parallel.unit_min_numel", "2000"}},
           {{"parallel.ranks", "4"}, {"parallel.strategy", "hsdp"}, {"comm.hook", "powersgd"}},
           {{"parallel.ranks", "1"}},
           {{"offload.parameters", "0.5"}, {"offload.gradients", "1"}, {"precision.param", "bf16"}},
           {{"train.steps", "2"}}}) {
    const TraceFile file = trace(more);
    file.expect_threads_in_turn();
    file.expect_gathers_lead_to_uses();
    EXPECT_EQ(steps_of(file, 1).size(), more.contains("train.steps") ? 1u : 3u);
    for (const TraceFile::Arrow& arrow : file.arrows) {
      EXPECT_TRUE(arrow.from != nullptr && arrow.to != nullptr) << arrow.name;
    }
  }
}

TEST_F(TraceOfARun, RefusesWhatItCannotHonour) {
  const auto error = [&](const Flags& more) {
    const Outcome outcome = run(more);
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_FALSE(std::filesystem::exists(folder_ / "run/log.jsonl")) << outcome.err;
    return outcome.err;
  };
  for (const char* steps : {"0:3", "3:2", "3:7", "3", "3:", ":3", "a:b", "3:4 ", "3-4", ""}) {
    EXPECT_TRUE(has(error({{"log.trace_steps", steps}}),
                    {"expected auto or FIRST:LAST from 1:1 to 6:6", "(log.trace_steps)"}))
        << steps;
  }
  EXPECT_TRUE(has(error({{"log.trace", ""}, {"log.trace_steps", "2:3"}}),
                  {"expected log.trace_steps with log.trace only"}));
  EXPECT_TRUE(has(error({{"log.trace", flags_.at("data.path")}}),
                  {"log.trace and data.path", "different files"}));
}

TEST_F(TraceOfARun, RefusesAFileThatCannotBeWritten) {
  for (const std::string& path : {folder_ / "no/such/folder.json", folder_.path()}) {
    const Outcome outcome = run({{"log.trace", path}});
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(has(outcome.err, {"expected", path})) << outcome.err;
    EXPECT_EQ(folder_.read("run/log.jsonl"), "") << "a step was made";
  }
  const Outcome same = run({{"log.trace", folder_ / "run/log.jsonl"}});
  EXPECT_EQ(same.exit_code, 1);
  EXPECT_TRUE(has(same.err, {"log.trace and out", "different files"})) << same.err;
}

TEST_F(TraceOfARun, EndsNoTrainingWhenTheDiskIsFull) {
  const Outcome outcome = run({{"log.trace", "/dev/full"}});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err, {"warning: [trace] /dev/full: No space left on device; the training "
                                "goes on without",
                                "error: ", "/dev/full"}))
      << outcome.err;
  EXPECT_EQ(log().size(), 7u) << "all steps, and the last record";
}

TEST_F(TraceOfARun, ReplacesTheOneBefore) {
  folder_.write("trace.json", std::string(1 << 20, 'x'));
  EXPECT_EQ(steps_of(trace(), 1).size(), 3u);
}

// Steps 1 to 4 by one run, without a trace, and what follows by another.
TEST_F(TraceOfARun, OfARunThatWasResumedShowsStepsThatItMade) {
  const Flags saves = {{"checkpoint.every", "4"}, {"train.schedule", "constant"}};
  const auto with_saves = [&](Flags more) {
    more.insert(saves.begin(), saves.end());
    return more;
  };
  const auto resumed = [&](Flags more) {
    std::filesystem::remove_all(folder_ / "run");
    EXPECT_EQ(run(with_saves({{"log.trace", ""}, {"train.steps", "4"}})).exit_code, 0);
    more["resume"] = "auto";
    return run(with_saves(more));
  };
  folder_.write("trace.json", "older");
  ASSERT_EQ(resumed({{"train.steps", "11"}}).exit_code, 0);
  for (const int process : {1, 2}) {
    EXPECT_EQ(steps_of(TraceFile(folder_.read("trace.json")), process),
              (std::set<std::string>{"step 7", "step 8", "step 9"}));
  }
  ASSERT_EQ(resumed({{"train.steps", "6"}}).exit_code, 0);
  EXPECT_EQ(steps_of(TraceFile(folder_.read("trace.json")), 1), (std::set<std::string>{"step 6"}));
  // What is asked for by number is what the log calls so.
  ASSERT_EQ(resumed({{"log.trace_steps", "3:5"}}).exit_code, 0);
  EXPECT_EQ(steps_of(TraceFile(folder_.read("trace.json")), 1), (std::set<std::string>{"step 5"}));

  folder_.write("trace.json", "older");
  const Outcome after = resumed({{"log.trace_steps", "2:4"}});
  EXPECT_EQ(after.exit_code, 0) << after.err;
  EXPECT_TRUE(has(after.out, {"trace " + path_ +
                              ": not written, as the run went on after step 4 and the steps "
                              "to record end with 4; what was there stays\n"}))
      << after.out;
  EXPECT_EQ(folder_.read("trace.json"), "older");
  EXPECT_TRUE(log().back().at("final").at("trace").at("file").is_null());
  EXPECT_EQ(resumed({{"train.steps", "4"}}).exit_code, 0);
  EXPECT_EQ(folder_.read("trace.json"), "older");
}

TEST_F(TraceOfARun, OfARunThatEndsEarlyLeavesTheOneBefore) {
  folder_.write("trace.json", "older");
  const Flags early = {{"train.max_minutes", "1e-9"}};
  const Outcome outcome = run(early);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has(outcome.out, {"not written, as the run ended before the end of step 3; what was "
                                "there stays\n"}));
  EXPECT_EQ(folder_.read("trace.json"), "older");
  std::filesystem::remove(path_);
  const Outcome first = run(early);
  EXPECT_TRUE(has(first.out, {"not written, as the run ended before the end of step 3\n"}));
  EXPECT_FALSE(std::filesystem::exists(path_)) << "an empty file is no trace";
}

TEST_F(TraceOfARun, OfARunThatFailsEarlyLeavesTheOneBefore) {
  const Flags diverges = {{"train.lr", "1e30"}, {"train.grad_clip", "0"}};
  const Outcome outcome = run(diverges);
  EXPECT_EQ(outcome.exit_code, 1) << outcome.out;
  EXPECT_FALSE(std::filesystem::exists(path_)) << "an empty file is no trace";
  folder_.write("trace.json", "older");
  EXPECT_EQ(run(diverges).exit_code, 1);
  EXPECT_EQ(folder_.read("trace.json"), "older");
}

TEST_F(TraceOfARun, OfARunThatFailsIsWhole) {
  const Outcome outcome =
      run({{"train.lr", "1e30"}, {"train.grad_clip", "0"}, {"log.trace_steps", "1:6"}});
  EXPECT_EQ(outcome.exit_code, 1) << outcome.out;
  EXPECT_TRUE(steps_of(TraceFile(folder_.read("trace.json")), 1).contains("step 1"));
}

// As docs/trace.md says.
TEST_F(TraceOfARun, OfARunThatWasKilledIsMadeWhole) {
  const std::string kill =
      command({{"train.steps", "1000000"}, {"log.trace_steps", "1:1000000"}}) +
      " & P=$!; until [ $(wc -l < " + path_ +
      ") -gt 100 ]; do kill -0 $P || exit 99; sleep 0.02; done; kill -KILL $P; wait $P";
  EXPECT_EQ(shell(kill).exit_code, 128 + 9);
  EXPECT_FALSE(is_json(folder_.read("trace.json")));
  const Outcome mended =
      shell("(sed '$d' " + path_ + " | sed '$s/,$//'; echo ']') > " + folder_ / "whole.json");
  EXPECT_EQ(mended.exit_code, 0) << mended.err;
  const json whole = parse_json(folder_.read("whole.json"));
  ASSERT_TRUE(whole.is_array());
  EXPECT_GE(whole.size(), 99u);
}

TEST_F(TraceOfARun, OfTheMultiLayerPerceptron) {
  testing::Images images;
  for (int i = 0; i < 8; ++i) images.add(static_cast<std::uint8_t>(i), i);
  std::filesystem::create_directory(folder_ / "data");
  for (const std::string part : {"train", "t10k"}) images.write(folder_, "data/" + part);
  const Outcome outcome = run_program(kMlp, Flags{{"data.path", folder_ / "data"},
                                                  {"model.hidden", "8"},
                                                  {"parallel.ranks", "2"},
                                                  {"train.batch", "1"},
                                                  {"train.steps", "4"},
                                                  {"out", folder_ / "run"},
                                                  {"device", "cpu"},
                                                  {"log.trace", path_}});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const TraceFile file(folder_.read("trace.json"));
  file.expect_threads_in_turn();
  EXPECT_GT(file.expect_gathers_lead_to_uses(), 0);
  EXPECT_EQ(steps_of(file, 2), (std::set<std::string>{"step 3", "step 4"}));
}

}  // namespace
}  // namespace tessera::testing
