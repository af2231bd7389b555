// Trainings that are interrupted, and go on: with the bits, and the log, of one that was not.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/faults.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/testing/small_models.h"
#include "tests/tools/testing/tiny_training.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::Fault;
using testing::Flags;
using testing::has;
using testing::Outcome;
using testing::run_program;

class Resume : public testing::TinyTraining {
 protected:
  Resume() {
    flags_["train.steps"] = "12";
    flags_["model.dropout"] = "0.1";
  }

  /// The records of a run below the folder.
  std::vector<json> log_of(const std::string& out) const {
    std::vector<json> records;
    std::istringstream lines(folder_.read(out + "/log.jsonl"));
    for (std::string line; std::getline(lines, line);) records.push_back(testing::parse_json(line));
    return records;
  }
  /// What must not depend on an interruption: losses, norms, rates of learning, and parameters.
  static std::string results(const std::vector<json>& log) {
    std::string text;
    for (const json& record : log) {
      for (const char* key : {"step", "loss", "grad_norm", "lr"}) {
        if (record.contains(key)) text += testing::json_text(record.at(key)) + " ";
      }
      if (record.contains("final"))
        text += testing::json_text(record.at("final").at("params_sha256"));
    }
    return text;
  }
  std::string results_of(const std::string& out) const { return results(log_of(out)); }
  std::string expected() {
    EXPECT_EQ(run({{"out", folder_ / "whole"}}).exit_code, 0);
    EXPECT_EQ(log_of("whole").size(), 13u);
    return results_of("whole");
  }
  std::vector<std::string> checkpoints(const std::string& out = "run") const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_ / out + "/checkpoints")) {
      if (entry.is_directory()) names.push_back(entry.path().filename().string());
    }
    std::ranges::sort(names);
    return names;
  }
};

const Flags kSaves = {{"checkpoint.every", "2"}, {"resume", "auto"}};

Flags saving(Flags more) {
  more.insert(kSaves.begin(), kSaves.end());
  return more;
}

TEST_F(Resume, AKilledRunGoesOnUnderOtherRanksAndStrategiesWithTheSameLog) {
  const std::string whole = expected();
  // At the rename that would name the checkpoint of step 4, and in the files of step 8.
  const Fault faults[] = {{"rename", testing::below(folder_, "run/checkpoints/step_4"), 1, "kill"},
                          {"write", testing::below(folder_, "run/checkpoints/step_8"), 2, "kill"}};
  EXPECT_EQ(run_program(testing::kTransformer, with(saving({})), with_fault(faults[0])).exit_code,
            -1);
  EXPECT_TRUE(fs::exists(folder_ / "run/checkpoints/step_2"));
  EXPECT_FALSE(fs::exists(folder_ / "run/checkpoints/step_4"));
  EXPECT_EQ(run_program(testing::kTransformer,
                        with(saving({{"parallel.strategy", "ddp"}, {"checkpoint.async", "false"}})),
                        with_fault(faults[1]))
                .exit_code,
            -1);
  EXPECT_EQ(folder_.read("run/checkpoints/latest"), "step_6\n");
  const Outcome last =
      run(saving({{"parallel.ranks", "1"}, {"train.accum", "2"}, {"checkpoint.keep", "2"}}));
  EXPECT_EQ(last.exit_code, 0) << last.err;
  EXPECT_TRUE(has(last.out, {"resumed after step 6 of 2 ranks, at sample 12 (",
                             "  changed: parallel.ranks=1 (was 2)\n",
                             "  changed: parallel.strategy=\"zero3\" (was \"ddp\")\n",
                             "  changed: train.accum=2 (was 1)\n"}));
  EXPECT_EQ(last.out.find("parallel.ranks=", last.out.find("(was 2)")), std::string::npos)
      << last.out;
  EXPECT_EQ(results_of("run"), whole);
  EXPECT_EQ(checkpoints(), (std::vector<std::string>{"step_10", "step_12"}));
}

TEST_F(Resume, AModelOfEachFamilyGoesOnUnderOtherRanksAndAStrategy) {
  for (const testing::SmallModel& model : testing::small_model_of_each_family()) {
    SCOPED_TRACE(model.family);
    flags_["train.steps"] = "6";
    flags_ = starting_from(model, flags_);
    const std::string saved = folder_ / (model.family + "/checkpoints");
    ASSERT_EQ(
        run({{"out", folder_ / model.family}, {"checkpoint.dir", saved}, {"checkpoint.every", "3"}})
            .exit_code,
        0);
    const Outcome outcome = run({{"out", folder_ / (model.family + "_on")},
                                 {"resume", saved + "/step_3"},
                                 {"parallel.ranks", "1"},
                                 {"train.accum", "2"},
                                 {"parallel.strategy", "ddp"}});
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_TRUE(has(outcome.out, {"resumed after step 3 of 2 ranks"})) << outcome.out;
    std::vector<json> rest = log_of(model.family);
    ASSERT_EQ(rest.size(), 7u);
    rest.erase(rest.begin(), rest.begin() + 3);
    EXPECT_EQ(results_of(model.family + "_on"), results(rest));
  }
}

TEST_F(Resume, ARunThatWasStoppedGoesOnFromItsLastStep) {
  const Outcome stopped = run(saving({{"train.max_minutes", "1e-9"}}));
  EXPECT_EQ(stopped.exit_code, 0) << stopped.err;
  EXPECT_TRUE(has(stopped.out, {"stopped by train.max_minutes after step 1 of 12\n"}));
  EXPECT_EQ(log_of("run").back().at("final").at("stopped_by"), "train.max_minutes");
  EXPECT_EQ(checkpoints(), (std::vector<std::string>{"step_1"}));
  // A signal, while it goes on.
  const Outcome signalled =
      shell(command(saving({{"train.steps", "1000000"}, {"train.schedule", "constant"}})) +
            " & P=$!; until [ $(wc -l < " + folder_ / "run/log.jsonl" +
            ") -gt 3 ]; do kill -0 $P || exit 99; sleep 0.02; done; kill -TERM $P; wait $P");
  EXPECT_EQ(signalled.exit_code, 0) << signalled.err;
  const std::int64_t steps = log_of("run").back().at("final").at("steps");
  EXPECT_GT(steps, 2);
  EXPECT_EQ(folder_.read("run/checkpoints/latest"), "step_" + std::to_string(steps) + "\n");
}

TEST_F(Resume, MoreStepsAreTrainedFromTheEnd) {
  EXPECT_EQ(run(saving({{"train.schedule", "constant"}, {"train.steps", "5"}})).exit_code, 0);
  EXPECT_EQ(run(saving({{"train.schedule", "constant"}})).exit_code, 0);
  const std::string first = results_of("run");
  EXPECT_EQ(run({{"train.schedule", "constant"}, {"out", folder_ / "whole"}}).exit_code, 0);
  EXPECT_EQ(first, results_of("whole"));
  // Nothing is left to do: the same parameters, and nothing is saved twice.
  const Outcome again = run(saving({{"train.schedule", "constant"}}));
  EXPECT_EQ(again.exit_code, 0) << again.err;
  EXPECT_EQ(results_of("run"), first);
}

TEST_F(Resume, WhatCannotBeDoneAnyMoreIsAnErrorOrSaid) {
  const Flags constant = {{"train.schedule", "constant"}, {"train.warmup", "0"}};
  const auto said = [&](Flags more, int exit_code) {
    more.insert(constant.begin(), constant.end());
    const Outcome outcome = run(more);
    EXPECT_EQ(outcome.exit_code, exit_code) << outcome.err;
    return outcome.out + outcome.err;
  };
  EXPECT_EQ(said(saving({{"train.steps", "5"}}), 0).find("note: "), std::string::npos);
  const std::string log = folder_.read("run/log.jsonl");
  EXPECT_TRUE(has(said(saving({{"train.steps", "4"}}), 1),
                  {"error: ",
                   "[checkpoint] expected train.steps of at least the 5 that are done, "
                   "got 4 (",
                   "/step_5)"}));
  EXPECT_EQ(folder_.read("run/log.jsonl"), log);
  EXPECT_TRUE(has(said(saving({{"train.steps", "5"}, {"audit", "true"}}), 0),
                  {"note: no step is left to train: train.steps=5, and as many are done\n",
                   "\nno step was compared with the plan\n"}));
  EXPECT_TRUE(has(said({{"train.steps", "6"}, {"resume", "auto"}}, 0),
                  {"resumed after step 5 ",
                   "note: this run saves nothing that the next "
                   "--resume=auto could go on from"}));
}

// The run before has validated after its last step, which is not the last one of this run.
TEST_F(Resume, TheStepAfterAValidationThatWasOwedIsAudited) {
  for (const char* strategy : {"zero3", "zero2", "ddp", "shard_grad_op", "hsdp"}) {
    fs::remove_all(folder_ / "run");
    const auto flags = [&](const char* steps) {
      return saving({{"train.schedule", "constant"},
                     {"parallel.strategy", strategy},
                     {"log.val_every", "2"},
                     {"train.steps", steps}});
    };
    EXPECT_EQ(run(flags("4")).exit_code, 0);
    EXPECT_EQ(log_of("run").size(), 6u);
    Flags audited = flags("8");
    audited["audit"] = "true";
    const Outcome outcome = run(audited);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err << strategy;
    // Steps 5, 6 and 8: step 7 follows a validation.
    EXPECT_TRUE(has(outcome.out, {"3 steps are as planned"})) << strategy;
    std::vector<json> validated = log_of("run");
    std::erase_if(validated, [](const json& record) { return !record.contains("val_loss"); });
    EXPECT_EQ(validated.size(), 3u) << "after steps 2, 4 and 6";
  }
}

TEST_F(Resume, TheSummaryIsOfTheStepsThatThisProcessMade) {
  EXPECT_EQ(run(saving({{"train.schedule", "constant"}, {"train.steps", "4"}})).exit_code, 0);
  const Outcome next = run(saving({{"train.schedule", "constant"}, {"train.steps", "8"}}));
  EXPECT_EQ(next.exit_code, 0) << next.err;
  EXPECT_TRUE(has(next.out, {"steps   3 measured, 1 before them left out"})) << next.out;
  const json summary = log_of("run").back().at("final").at("summary");
  EXPECT_EQ(summary.at("steps"), 3);
  EXPECT_EQ(summary.at("warmup_steps"), 1);
  EXPECT_EQ(summary.at("sent_bytes"), summary.at("planned").at("sent_bytes"));
  // A single step is the first of its process, which has nothing gathered ahead.
  EXPECT_EQ(run(saving({{"train.schedule", "constant"}, {"train.steps", "9"}})).exit_code, 0);
  const json one = log_of("run").back().at("final").at("summary");
  EXPECT_EQ(one.at("sent_bytes"), one.at("planned").at("sent_bytes"));
  EXPECT_NE(one.at("sent_bytes"), summary.at("sent_bytes"));
}

TEST_F(Resume, AProbeHasTheStepsThatThisProcessMade) {
  EXPECT_EQ(run(saving({{"train.schedule", "constant"}, {"train.steps", "4"}})).exit_code, 0);
  const std::string path = folder_ / "probe.jsonl";
  const auto said = [&](Flags flags) {
    flags["train.schedule"] = "constant";
    flags["log.probe"] = path;
    const Outcome outcome = run(saving(flags));
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return outcome.out;
  };
  EXPECT_TRUE(has(said({{"train.steps", "5"}, {"log.probe_steps", "1:3"}}),
                  {"not written, as the run went on after step 4"}));
  EXPECT_FALSE(fs::exists(path));
  EXPECT_TRUE(has(said({{"train.steps", "7"}}), {"checksums of steps 6 to 7\n"}));
  EXPECT_TRUE(folder_.read("probe.jsonl").find("\"first_step\":6") != std::string::npos);
  EXPECT_TRUE(has(said({{"train.steps", "9"}, {"log.probe_steps", "3:8"}}),
                  {"checksums of steps 8 to 8\n"}));
}

TEST_F(Resume, FromAFolderOfOneOrOfSeveralIntoAnother) {
  EXPECT_NE(expected(), "");
  EXPECT_EQ(run({{"checkpoint.every", "4"}, {"out", folder_ / "a"}}).exit_code, 0);
  for (const std::string from : {"a/checkpoints/step_8", "a/checkpoints"}) {
    const Outcome next = run({{"resume", folder_ / from}, {"out", folder_ / "b"}});
    ASSERT_EQ(next.exit_code, 0) << next.err;
    EXPECT_FALSE(fs::exists(folder_ / "b/checkpoints"));
    // Its own log has the steps that it made.
    const std::vector<json> log = log_of("b");
    EXPECT_EQ(log.front().at("step"), 9);
    EXPECT_EQ(log.back().at("final").at("params_sha256"),
              log_of("whole").back().at("final").at("params_sha256"));
  }
}

// Files that have come into another run's folder are known by the run that they are of.
TEST_F(Resume, CheckpointsThatAreSavedElsewhereAreOfTheRunThatGoesOn) {
  const auto run_of = [&](const std::string& out, int step) {
    const std::string path = fmt::format("{}/checkpoints/step_{}/manifest.json", out, step);
    return testing::parse_json(folder_.read(path)).at("run").get<std::string>();
  };
  EXPECT_EQ(run({{"checkpoint.every", "8"}, {"out", folder_ / "a"}}).exit_code, 0);
  EXPECT_EQ(run({{"checkpoint.every", "8"}, {"out", folder_ / "b"}}).exit_code, 0);
  EXPECT_NE(run_of("a", 8), run_of("b", 8)) << "two runs";
  for (const std::string from : {"a/checkpoints/step_8", "a/checkpoints"}) {
    const std::string out = from.ends_with('8') ? "one" : "several";
    const Flags flags = {{"resume", folder_ / from},
                         {"out", folder_ / out},
                         {"checkpoint.every", "8"},
                         {"train.steps", "14"},
                         {"train.schedule", "constant"}};
    const Outcome next = run(flags);
    ASSERT_EQ(next.exit_code, 0) << next.err;
    EXPECT_EQ(run_of(out, 14), run_of("a", 8)) << from;
  }
}

TEST_F(Resume, WhatDoesNotFitIsRefusedBeforeTraining) {
  EXPECT_EQ(run({{"checkpoint.every", "6"}, {"save.final", folder_ / "model"}}).exit_code, 0);
  const std::string log = folder_.read("run/log.jsonl");
  const std::string empty = folder_ / "empty";
  fs::create_directory(empty);
  fs::create_directory(folder_ / "notes");
  folder_.write("notes/a.txt", "a");
  const struct {
    Flags flags;
    std::vector<std::string> says;
  } cases[] = {
      {{{"checkpoint.every", "6"}},
       {"expected a folder without checkpoints for a new run, got one that has step 12 (",
        "); --resume=auto goes on from it, another --out or --checkpoint.dir begins a new run\n"}},
      {{{"resume", "auto"}, {"model.heads", "4"}},
       {"expected a checkpoint of this model", "heads\":2"}},
      {{{"resume", "auto"}, {"model.layers", "3"}},
       {"[checkpoint]", "missing: parameter", " more\n  (",
        "\n  changed since it was saved: model.layers=3 (was "}},
      {{{"resume", folder_ / "run/checkpoints/step_12"}, {"model.dim", "32"}},
       {": expected shape (32), got (", "changed since it was saved: model.dim=32 (was "}},
      {{{"resume", folder_ / "run/checkpoints"}, {"model.dim", "32"}, {"out", folder_ / "other"}},
       {": expected shape (32), got (", "changed since it was saved: model.dim=32 (was "}},
      {{{"resume", "auto"}, {"train.optimizer", "sgd"}, {"train.momentum", "0.9"}},
       {"missing: optimizer.", "unexpected: optimizer.",
        "changed since it was saved: train.optimizer=\"sgd\" (was \"adamw\")",
        "\n  --checkpoint.strict=false starts what is missing from nothing"}},
      {{{"resume", "yes"}}, {"expected none, auto or a folder with a checkpoint, got 'yes'"}},
      {{{"resume", folder_ / "text.txt"}}, {"expected none, auto or a folder", "text.txt'"}},
      {{{"resume", empty}},
       {"expected a checkpoint or a folder of checkpoints, got an empty folder (resume, "}},
      {{{"resume", folder_ / "model"}},
       {"got the folder of a model, from which --init.from=" + (folder_ / "model begins a new")}},
      {{{"resume", folder_.path()}},
       {"got a folder of runs, such as the one whose checkpoints --resume=" +
        (folder_ / "run/checkpoints goes on")}},
      {{{"resume", folder_ / "notes"}}, {"got a folder that has neither a manifest.json nor a"}},
      {{{"resume", folder_ / "run"}},
       {"got the folder of a run", "--resume=" + (folder_ / "run/checkpoints ")}},
      {{{"resume", folder_ / "run/"}, {"out", folder_ / "other"}},
       {"got the folder of a run", "--resume=" + (folder_ / "run/checkpoints ")}},
      {{{"resume", folder_ / "run/checkpoints/step_6"}, {"checkpoint.every", "1"}},
       {"expected a folder for what follows step 6, got one that has step 12"}},
      {{{"checkpoint.keep", "1"}}, {"expected checkpoint.every with checkpoint.keep"}},
      {{{"checkpoint.dir", folder_ / "c"}}, {"expected checkpoint.every or resume=auto"}},
      {{{"checkpoint.strict", "false"}}, {"expected resume with checkpoint.strict=false"}},
  };
  for (const auto& c : cases) {
    const Outcome outcome = run(c.flags);
    EXPECT_EQ(outcome.exit_code, 1) << outcome.out;
    for (const std::string& part : c.says) EXPECT_TRUE(has(outcome.err, {part}));
    // No rank was late.
    EXPECT_EQ(outcome.err.find("each rank"), std::string::npos) << outcome.err;
    EXPECT_FALSE(fs::exists(folder_ / "run/flight.json"));
    EXPECT_EQ(folder_.read("run/log.jsonl"), log);
  }
  const Outcome other = run({{"resume", "auto"},
                             {"train.optimizer", "sgd"},
                             {"train.momentum", "0.9"},
                             {"checkpoint.strict", "false"},
                             {"train.steps", "13"}});
  EXPECT_EQ(other.exit_code, 0) << other.err;
  EXPECT_TRUE(has(other.out, {"not loaded: missing: optimizer.", "not loaded: unexpected:"}));
}

TEST_F(Resume, SaysThatAHooksBlocksWerePackedOtherwise) {
  const Flags hook = {{"comm.hook", "powersgd"},
                      {"powersgd.start_step", "1"},
                      {"powersgd.min_compression_rate", "1"}};
  Flags saved = saving(hook), packed = saved;
  EXPECT_EQ(run(saved).exit_code, 0);
  packed["parallel.unit_min_numel"] = "100000";
  const Outcome outcome = run(packed);
  EXPECT_EQ(outcome.exit_code, 1) << outcome.out;
  EXPECT_TRUE(has(outcome.err, {"blocks packed as they were saved, into units ", "h.0, h.1",
                                "got a unit h.0..h.1:", "parallel.unit_min_numel"}))
      << outcome.err;
}

TEST_F(Resume, NoOutputIsAFileOfACheckpoint) {
  const std::string steps = folder_ / "run/checkpoints", moved = folder_ / "moved";
  const Flags fields = {{"train.steps", "4"}, {"train.schedule", "constant"}};
  Flags first = saving(fields);
  EXPECT_EQ(run(first).exit_code, 0);
  fs::copy(steps, moved, fs::copy_options::recursive);
  const std::string manifest = folder_.read("run/checkpoints/step_4/manifest.json");
  fs::create_hard_link(steps + "/step_4/manifest.json", folder_ / "hard");
  fs::create_symlink(steps + "/latest", folder_ / "symbolic");
  const auto refused = [&](Flags more, const std::string& option, const std::string& what) {
    more.insert(fields.begin(), fields.end());
    const Outcome outcome = run(more);
    EXPECT_EQ(outcome.exit_code, 1) << option << outcome.out;
    EXPECT_TRUE(has(outcome.err, {"[config] expected " + option + " ", what})) << outcome.err;
    EXPECT_EQ(folder_.read("run/checkpoints/step_4/manifest.json"), manifest);
    EXPECT_EQ(folder_.read("run/checkpoints/latest"), folder_.read("moved/latest"));
  };
  const std::string no_file = "to name no file of the checkpoints";
  for (const char* option : {"log.trace", "log.jsonl", "log.probe"}) {
    for (const std::string& path : {steps + "/step_4/manifest.json", steps + "/latest",
                                    steps + "/.lock", folder_ / "hard", folder_ / "symbolic"}) {
      refused({{"resume", "auto"}, {option, path}}, option, no_file);
    }
    refused({{"resume", moved}, {option, moved + "/latest"}}, option, no_file);
    refused({{"resume", moved + "/step_4"}, {option, moved + "/step_4/new"}}, option, no_file);
  }
  refused({{"plan", "true"}, {"log.trace", steps + "/latest"}}, "log.trace", no_file);
  for (const char* option : {"log.tensorboard", "save.final"}) {
    refused({{"resume", "auto"}, {option, steps + "/step_4"}}, option, no_file);
    refused({{"resume", "auto"}, {option, steps + "/step_6"}}, option, no_file);
    refused({{"resume", moved + "/step_2"}, {option, moved + "/step_2"}}, option, no_file);
  }
  refused({{"resume", "auto"}, {"out", moved + "/step_4"}, {"checkpoint.dir", moved + "/step_4"}},
          "out", no_file);
  // What is pruned is no input.
  const std::string text = folder_.read("text.txt");
  const std::string data = folder_.write("run/checkpoints/step_2/text.txt", text);
  refused(saving({{"data.path", data}}), "data.path", no_file);
  EXPECT_EQ(folder_.read("run/checkpoints/step_2/text.txt"), text);
}

TEST_F(Resume, CheckpointsHaveAFolderOfTheirOwn) {
  const Outcome outcome = run(saving({{"checkpoint.dir", folder_ / "run"}}));
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err, {"[config] expected out to name no file of the checkpoints"}));
  EXPECT_FALSE(fs::exists(folder_ / "run"));
}

TEST_F(Resume, ADamagedCheckpointIsPassedOverAloud) {
  EXPECT_EQ(run(saving({{"train.steps", "8"}, {"train.schedule", "constant"}})).exit_code, 0);
  std::string manifest = folder_.read("run/checkpoints/step_8/manifest.json");
  manifest[manifest.size() / 2] ^= 1;
  folder_.write("run/checkpoints/step_8/manifest.json", manifest);
  const Outcome next = run(saving({{"train.steps", "8"}, {"train.schedule", "constant"}}));
  EXPECT_EQ(next.exit_code, 0) << next.err;
  EXPECT_TRUE(has(next.out, {"warning: passed over, as it does not verify", "step_8/manifest.json",
                             "resumed after step 6"}));
  EXPECT_EQ(checkpoints(),
            (std::vector<std::string>{"step_4", "step_6", "step_8", "step_8.damaged-0"}));
}

TEST_F(Resume, ACheckpointThatIsNotTheStepOfItsNameIsPassedOverAloud) {
  const Flags constant = {{"train.schedule", "constant"}};
  Flags four = saving({{"train.steps", "4"}, {"checkpoint.keep", "2"}});
  four.insert(constant.begin(), constant.end());
  EXPECT_EQ(run(four).exit_code, 0);
  const std::string folder = folder_ / "run/checkpoints";
  fs::copy(folder + "/step_2", folder + "/step_99", fs::copy_options::recursive);
  const Outcome next = run(saving({{"train.schedule", "constant"}, {"checkpoint.keep", "2"}}));
  EXPECT_EQ(next.exit_code, 0) << next.err;
  EXPECT_TRUE(
      has(next.out, {"warning: passed over", "step_99 is in fact the checkpoint of step 2 (",
                     "resumed after step 4 "}));
  EXPECT_EQ(checkpoints(), (std::vector<std::string>{"step_10", "step_12", "step_99"}));
  EXPECT_EQ(run({{"train.schedule", "constant"}, {"out", folder_ / "whole"}}).exit_code, 0);
  EXPECT_EQ(results_of("run"), results_of("whole"));
  // Who asks for it by its path gets what it is, and is told.
  const Outcome named = run(
      {{"train.schedule", "constant"}, {"resume", folder + "/step_99"}, {"out", folder_ / "b"}});
  EXPECT_EQ(named.exit_code, 0) << named.err;
  EXPECT_TRUE(has(named.out, {"resumed after step 2 ", "warning: step_99 is in fact"}));
  EXPECT_EQ(log_of("b").front().at("step"), 3);
}

TEST_F(Resume, ADiskThatFailsEndsTheRunWithTheCheckpointsThatWere) {
  const std::string at = testing::below(folder_, "run/checkpoints/step_4");
  const struct {
    Fault fault;
    std::string cause;
  } cases[] = {
      {{"write", at, 3, std::to_string(ENOSPC)}, "No space left on device"},
      // Where a folder cannot get another name, as in a lower layer of an overlay.
      {{"rename", at, 1, std::to_string(EXDEV)}, "Invalid cross-device link"},
  };
  const std::string whole = expected();
  for (const auto& c : cases) {
    fs::remove_all(folder_ / "run");
    const Outcome outcome =
        run_program(testing::kTransformer, with(saving({})), with_fault(c.fault));
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(has(outcome.err, {c.cause, "step_4.tmp-", "(rank "}));
    EXPECT_EQ(checkpoints(), (std::vector<std::string>{"step_2"}));
    EXPECT_EQ(run(saving({})).exit_code, 0);
    EXPECT_EQ(results_of("run"), whole);
  }
}

TEST_F(Resume, AFileThatIsOverTheUsersLimitIsAnErrorAndNoSignal) {
  EXPECT_EQ(run(saving({{"train.max_minutes", "1e-9"}})).exit_code, 0);
  const std::string log = folder_.read("run/log.jsonl");
  std::uintmax_t smallest = std::numeric_limits<std::uintmax_t>::max();
  for (const auto& entry : fs::directory_iterator(folder_ / "run/checkpoints/step_1")) {
    if (entry.path().extension() != ".json") smallest = std::min(smallest, entry.file_size());
  }
  // Blocks of 512 bytes.
  ASSERT_GT(smallest, 3 * log.size() + 4096);
  const Outcome outcome =
      shell(fmt::format("ulimit -f {}; exec {}", smallest / 512 - 1, command(saving({}))));
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err, {"error: [file] expected to write ", "got File too large",
                                "/step_2.tmp-", "-of-00002.safetensors", "(rank "}));
  EXPECT_EQ(checkpoints(), (std::vector<std::string>{"step_1"}));
  EXPECT_EQ(run(saving({})).exit_code, 0);
  EXPECT_EQ(results_of("run"), expected());
}

TEST_F(Resume, TheAuditHoldsForTheStepsThatFollow) {
  EXPECT_EQ(run(saving({{"train.steps", "4"}, {"train.schedule", "constant"}})).exit_code, 0);
  const Outcome outcome = run(saving({{"audit", "true"}, {"train.schedule", "constant"}}));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has(outcome.out, {"8 steps are as planned"}));
}

}  // namespace
}  // namespace tessera
