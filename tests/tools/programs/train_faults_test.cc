// Training in a world that misbehaves: signals, readers that pause or go away, disks that are full
// or slow, numbers that run away, memory that runs out.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/testing/tiny_training.h"

namespace tessera {
namespace {

using nlohmann::json;
using testing::Flags;
using testing::has;
using testing::kMlp;
using testing::Outcome;

constexpr const char* kForever = "1000000000";

/// Steps take about a millisecond.
class TrainFaults : public testing::TinyTraining {
 protected:
  TrainFaults() {
    flags_["model.layers"] = "1";
    flags_["save.final"] = folder_ / "model";
  }

  /// Starts `training` as $P and runs `script`; the exit code of the training, which is killed if
  /// it goes on for two minutes after that.
  Outcome meanwhile(const std::string& training, const std::string& script) const {
    return shell(training + " & P=$!; " + script +
                 "; (sleep 120; kill -KILL $P) & W=$!; wait $P; R=$?; kill $W; exit $R");
  }
  /// Starts `training` as $P and runs `script` once it has logged a step; what meanwhile() returns.
  Outcome during(const std::string& training, const std::string& script) const {
    return meanwhile(training, "until [ -s " + folder_ / "run/log.jsonl" +
                                   " ]; do kill -0 $P || exit 99; sleep 0.02; done; " + script);
  }
  bool has_model() const {
    return std::filesystem::exists(folder_ / "model/config.json") &&
           std::filesystem::exists(folder_ / "model/model.safetensors");
  }
  /// The temporary files that are left, and a flight.json that is not whole.
  std::string half_written() const {
    std::string left;
    for (const char* folder : {"run", "model"}) {
      if (!std::filesystem::exists(folder_ / folder)) continue;
      for (const auto& entry : std::filesystem::directory_iterator(folder_ / folder)) {
        const std::string name = entry.path().filename().string();
        if (name.find(".tmp-") != std::string::npos) left += name + " ";
      }
    }
    const std::string flight = folder_.read("run/flight.json");
    return flight.empty() || testing::is_json(flight) ? left : left + "flight.json";
  }
  json last_line() const {
    std::istringstream file(folder_.read("run/log.jsonl"));
    std::string last;
    for (std::string line; std::getline(file, line);) last = line;
    return last.empty() ? json() : testing::parse_json(last);
  }
};

// Signals
// ------------------------------------------------------------------------------------------------

TEST_F(TrainFaults, ASignalEndsTheTrainingAfterTheStepWithItsModel) {
  for (const std::string signal : {"TERM", "HUP"}) {
    std::filesystem::remove_all(folder_ / "run");
    std::filesystem::remove_all(folder_ / "model");
    const Outcome outcome = during(command({{"train.steps", kForever}, {"sample.tokens", "9"}}),
                                   "kill -" + signal + " $P");
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_TRUE(has(outcome.err, {"SIG" + signal + ": ending soon"}));
    EXPECT_TRUE(has(outcome.out, {"stopped by SIG" + signal + " after step ", "of 1000000000\n",
                                  "parameters sha256 ", "model in "}));
    EXPECT_EQ(outcome.out.find("generated"), std::string::npos);
    EXPECT_TRUE(has_model());
    const json end = last_line().at("final");
    EXPECT_EQ(end.at("stopped_by"), "SIG" + signal);
    // The steps that it names are those that were logged, and the model is the one after them.
    const std::int64_t steps = end.at("steps");
    const std::string log = folder_.read("run/log.jsonl");
    EXPECT_EQ(std::ranges::count(log, '\n'), steps + 1);
    const Outcome again = shell(command({{"train.steps", "0"},
                                         {"init.from", folder_ / "model"},
                                         {"save.final", folder_ / "copy"}}));
    EXPECT_TRUE(has(again.out, {end.at("params_sha256").get<std::string>()}));
  }
}

TEST_F(TrainFaults, InterruptIsATerminalsSignal) {
  // A shell without job control starts what is in the background with SIGINT ignored. timeout sends
  // the signal twice: to the program and to its group.
  const Outcome outcome =
      shell("timeout --signal=INT 1 " + command({{"train.steps", kForever}}) + "; echo $?");
  EXPECT_TRUE(has(outcome.out, {"stopped by SIGINT after step ", "124\n"})) << outcome.err;
  EXPECT_TRUE(has_model());
}

TEST_F(TrainFaults, ASignalThatIsIgnoredStaysIgnored) {
  const Outcome outcome = during("(trap '' HUP; exec " + command({{"train.steps", kForever}}) + ")",
                                 "kill -HUP $P; sleep 0.3; kill -TERM $P");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(last_line().at("final").at("stopped_by"), "SIGTERM");
}

TEST_F(TrainFaults, ASignalInAStepEndsTheTrainingAfterThatStep) {
  // Steps of about a second, so that the signal comes in the second one.
  const Flags slow = {{"model.dim", "64"}, {"train.accum", "600"}, {"train.steps", "9"}};
  const Outcome outcome = during(command(slow), "kill -TERM $P");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(last_line().at("final").at("steps"), 2);
}

TEST_F(TrainFaults, ASecondSignalEndsAtOnce) {
  // Steps long enough for both signals to come in one.
  const Flags slow = {{"model.layers", "6"}, {"model.dim", "128"},    {"model.seq", "256"},
                      {"train.batch", "4"},  {"train.accum", "1000"}, {"train.steps", "2"}};
  const std::string err = folder_ / "err";
  const Outcome outcome = meanwhile(
      command(slow) + " 2> " + err,
      "until [ -e " + folder_ / "run/config.toml" +
          " ]; do kill -0 $P || exit 99; sleep 0.02; done; sleep 0.5; kill -TERM $P; until [ -s " +
          err + " ]; do kill -0 $P || exit 99; sleep 0.05; done; sleep 0.2; kill -HUP $P");
  EXPECT_EQ(outcome.exit_code, 128 + SIGHUP) << folder_.read("err");
  EXPECT_TRUE(has(folder_.read("err"), {"SIGTERM: ending soon"}));
  EXPECT_FALSE(has_model());
}

TEST_F(TrainFaults, TwoSignalsAtOnceAreOneRequest) {
  const Outcome outcome =
      during(command({{"train.steps", kForever}}), "kill -TERM $P; kill -HUP $P");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has_model());
}

TEST_F(TrainFaults, ASignalEndsSamplingAndValidationToo) {
  const Outcome sampling =
      during(command({{"sample.tokens", "1000000"}}), "sleep 1; kill -TERM $P");
  EXPECT_EQ(sampling.exit_code, 0) << sampling.err;
  EXPECT_TRUE(has(sampling.out, {"stopped by SIGTERM while sampling"}));
  EXPECT_EQ(last_line().at("final").at("stopped_by"), "SIGTERM");
  std::string text;
  while (text.size() < 3'000'000) text += "A long text, most of it for validation.\n";
  std::filesystem::remove_all(folder_ / "run");
  const Outcome validating = during(command({{"data.path", folder_.write("long.txt", text)},
                                             {"data.val_fraction", "0.99"},
                                             {"model.dim", "64"}}),
                                    "sleep 0.5; kill -TERM $P");
  EXPECT_EQ(validating.exit_code, 0) << validating.err;
  EXPECT_TRUE(has(validating.out, {"stopped by SIGTERM after step 3 of 3"}));
  EXPECT_TRUE(last_line().at("final").at("val_loss").is_null());
}

// Which is then not logged, so that a run that goes on from there makes it again.
TEST_F(TrainFaults, ASignalEndsTheTextsOfAValidation) {
  std::string prompts;
  for (int i = 0; i < 200'000; ++i) prompts += "a\n";
  const Outcome outcome = during(
      command({{"log.val_prompts", folder_.write("prompts.txt", prompts)}, {"sample.tokens", "7"}}),
      "sleep 2; kill -TERM $P");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has(outcome.out, {"stopped by SIGTERM after step 3 of 3"}));
  EXPECT_EQ(outcome.out.find("val loss"), std::string::npos);
  EXPECT_TRUE(last_line().at("final").at("val_loss").is_null());
  EXPECT_FALSE(last_line().at("final").contains("continuations"));
}

TEST_F(TrainFaults, EveryRankEndsAfterTheSameStep) {
  flags_["parallel.ranks"] = "4";
  for (const char* strategy : {"zero3", "ddp"}) {
    std::filesystem::remove_all(folder_ / "run");
    const Outcome outcome = during(
        command({{"train.steps", kForever}, {"parallel.strategy", strategy}, {"train.accum", "2"}}),
        "kill -TERM $P");
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_EQ(last_line().at("final").at("stopped_by"), "SIGTERM");
  }
}

TEST_F(TrainFaults, TheOtherTrainerEndsAsWell) {
  const Outcome outcome =
      during(kMlp + " --device=cpu --model.hidden=8 --log.every=0 --log.peak_ms=0 --out=" +
                 folder_ / "run" + " --train.steps=" + kForever,
             "kill -TERM $P");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(last_line().at("final").at("stopped_by"), "SIGTERM");
  EXPECT_TRUE(last_line().at("final").at("val_loss").is_null());
}

TEST_F(TrainFaults, TimeInWhichTheProcessWasStoppedIsNobodysDelay) {
  const Outcome outcome = during(
      command({{"train.steps", kForever}, {"parallel.deadline_s", "1"}, {"parallel.ranks", "4"}}),
      "for i in 1 2; do kill -STOP $P; sleep 2.5; kill -CONT $P; sleep 0.3; done; kill -TERM $P");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has_model());
}

// Output
// ------------------------------------------------------------------------------------------------

// Shorter and longer than the deadline, at moments that nobody chose.
TEST_F(TrainFaults, BeingStoppedChangesNoBit) {
  const std::string training =
      command({{"train.steps", "400"}, {"parallel.deadline_s", "1"}, {"parallel.ranks", "3"}});
  const auto sha256 = [this] { return last_line().at("final").at("params_sha256"); };
  ASSERT_EQ(shell(training).exit_code, 0);
  const json expected = sha256();
  const Outcome outcome =
      during(training,
             "for s in 0.3 1.5 0.1; do kill -STOP $P; sleep $s; kill -CONT $P; sleep 0.02; done");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(sha256(), expected);
}

TEST_F(TrainFaults, AReaderThatPausesHoldsUpNobody) {
  // 3,000 lines are more than a pipe takes.
  const Flags flags = {{"train.steps", "3000"}, {"log.every", "1"}, {"parallel.deadline_s", "0.5"}};
  const std::string log = folder_ / "run/log.jsonl";
  const Outcome outcome = shell("(" + command(flags) + "; echo exit $?) | (until grep -q 2999 " +
                                log + " 2>/dev/null; do sleep 0.05; done; sleep 1; cat)");
  EXPECT_TRUE(has(outcome.out, {"step     1/3000 ", "step  3000/3000 | loss", "exit 0\n"}))
      << outcome.err;
  EXPECT_TRUE(has_model());
}

TEST_F(TrainFaults, ALogThatIsAPipeMayPauseToo) {
  const std::string pipe = folder_ / "pipe";
  const Outcome outcome = shell(
      "mkfifo " + pipe + "; (exec < " + pipe + "; sleep 2; cat > " + folder_ / "got" + ") & " +
      command({{"train.steps", "3000"}, {"parallel.deadline_s", "0.5"}, {"log.jsonl", pipe}}) +
      " || exit 1; wait");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  const std::string got = folder_.read("got");
  // The steps, a validation after each 200 but the last, and the end.
  EXPECT_EQ(std::ranges::count(got, '\n'), 3000 + 14 + 1);
  EXPECT_TRUE(got.ends_with("}}\n"));
}

// The run waits for its last line to be read when the signal comes.
TEST_F(TrainFaults, ASignalEndsTheWaitForAReaderThatNeverReads) {
  const std::string pipe = folder_ / "pipe";
  const Outcome outcome =
      meanwhile("mkfifo " + pipe + "; exec 3<>" + pipe + "; " +
                    command({{"train.steps", "3000"}, {"log.every", "1"}}) + " > " + pipe,
                "until grep -q '\"final\"' " + folder_ / "run/log.jsonl" +
                    " 2>/dev/null; do kill -0 $P || exit 99; sleep 0.02; done; sleep 0.5; "
                    "kill -TERM $P");
  EXPECT_EQ(outcome.exit_code, 1) << outcome.err;
  EXPECT_TRUE(has(outcome.err, {"SIGTERM: ending soon", "[writer]", "timed out (stdout)"}));
  EXPECT_TRUE(has_model());
}

TEST_F(TrainFaults, APipeThatNobodyReadsYetIsWaitedForAndSaysSo) {
  const std::string pipe = folder_ / "pipe", err = folder_ / "err";
  for (const char* option : {"log.jsonl", "log.trace"}) {
    std::filesystem::remove_all(pipe);
    const Outcome outcome =
        shell("mkfifo " + pipe + "; " + command({{option, pipe}}) + " 2> " + err +
              " & P=$!; until grep -q 'waiting for a reader of the pipe " + pipe + "' " + err +
              " 2>/dev/null; do kill -0 $P || exit 99; sleep 0.02; done; cat " + pipe + " > " +
              folder_ / "got" + "; wait $P");
    EXPECT_EQ(outcome.exit_code, 0) << option << folder_.read("err");
    EXPECT_GT(folder_.read("got").size(), 100u) << option;
  }
}

TEST_F(TrainFaults, AFullDiskUnderTheLogLosesLinesAndNothingElse) {
  for (const char* full : {" --log.jsonl=/dev/full", " --log.every=1 > /dev/full"}) {
    std::filesystem::remove_all(folder_ / "model");
    flags_.erase("log.every");
    const Outcome outcome = shell(command({{"train.steps", "50"}}) + full);
    EXPECT_EQ(outcome.exit_code, 1) << full;
    EXPECT_TRUE(has(outcome.err, {"warning: [log] ", "No space left on device", "goes on without\n",
                                  "error: [writer] expected to write all output"}));
    EXPECT_EQ(outcome.err.find("warning: "), outcome.err.rfind("warning: ")) << outcome.err;
    EXPECT_EQ(outcome.out.find("stopped by"), std::string::npos);
    EXPECT_TRUE(has_model()) << full;
  }
  EXPECT_EQ(last_line().at("final").at("steps"), 50);
}

TEST_F(TrainFaults, AReaderThatHasGoneEndsTheTraining) {
  for (const char* unbuffered : {"", "stdbuf -o0 "}) {
    std::filesystem::remove_all(folder_ / "model");
    const Outcome outcome = shell("(" + std::string(unbuffered) +
                                  command({{"train.steps", kForever}, {"log.every", "1"}}) +
                                  "; echo $? > " + folder_ / "status" + ") | head -1");
    EXPECT_EQ(std::ranges::count(outcome.out, '\n'), 1);
    EXPECT_EQ(folder_.read("status"), "1\n");
    EXPECT_TRUE(
        has(outcome.err, {"warning: [log] stdout: Broken pipe; the training ends after this "
                          "step\n"}));
    EXPECT_EQ(last_line().at("final").at("stopped_by"), "SIGPIPE");
    EXPECT_TRUE(has_model());
  }
}

TEST_F(TrainFaults, ASaveMayTakeLongerThanTheDeadline) {
  const std::string shim = std::filesystem::absolute("tests/testing/slow_fsync.so");
  const Outcome outcome = shell(
      command({{"parallel.deadline_s", "0.2"}, {"parallel.ranks", "4"}, {"sample.tokens", "5"}}),
      {{"LD_PRELOAD", shim}, {"FSYNC_MS", "700"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has_model());
}

TEST_F(TrainFaults, ASampleThatCannotBeWrittenCostsNothingElse) {
  flags_["sample.tokens"] = "20000";
  const Outcome outcome = during(command(), "rm -rf " + folder_ / "run");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err, {"error: [file]", "sample.txt"}));
  EXPECT_TRUE(has(outcome.out, {"parameters sha256", "model in "}));
  EXPECT_TRUE(has_model());
}

TEST_F(TrainFaults, DataThatShrinkEndTheTrainingOnAllRanks) {
  flags_["checkpoint.every"] = "1";
  const Outcome outcome =
      during(command({{"train.steps", kForever}}), "truncate -s 100 " + flags_.at("data.path"));
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(
      has(outcome.err, {"error: ", ": [file] expected ", "got the end of the file", "text.txt"}));
  EXPECT_FALSE(has_model());
  EXPECT_EQ(half_written(), "");
}

// Numbers
// ------------------------------------------------------------------------------------------------

TEST_F(TrainFaults, AResultThatIsNotFiniteIsAnError) {
  const Flags diverges = {{"train.lr", "1e30"}, {"train.warmup", "0"}, {"train.steps", "1"}};
  const Outcome outcome = shell(command(diverges));
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err, {"[train]", "finite validation loss", "after step 1"}));
  // Without a validation the parameters tell.
  Flags blind = diverges;
  blind["data.val_fraction"] = "0";
  blind["train.weight_decay"] = "1e30";
  const Outcome unseen = shell(command(blind));
  EXPECT_EQ(unseen.exit_code, 1);
  EXPECT_TRUE(has(unseen.err, {"[train]", "finite parameters after training", "inf", "(h.0."}));
  EXPECT_FALSE(has_model());
}

// Flight recorder
// ------------------------------------------------------------------------------------------------

TEST_F(TrainFaults, ARunThatFailsLeavesWhatItsRanksCalledAndSaysWhere) {
  const std::string path = folder_ / "run/flight.json";
  const Outcome failed = shell(command({{"train.lr", "1e30"}, {"train.warmup", "0"}}));
  EXPECT_EQ(failed.exit_code, 1);
  EXPECT_TRUE(has(failed.err, {"error: ", ": [train]", "\n  what each rank called last: " + path,
                               "//tools:doctor --flight " + path}));
  const json flight = testing::parse_json(folder_.read("run/flight.json"));
  EXPECT_EQ(flight.at("ranks").size(), 2);
  EXPECT_GT(flight.at("ranks")[1].at("entries").size(), 10);
  EXPECT_TRUE(failed.err.starts_with("error: " + flight.at("error").get<std::string>()));
  // The next run, which does not fail, leaves none.
  EXPECT_EQ(shell(command()).exit_code, 0);
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(TrainFaults, OtherRanksAreToldTheErrorItself) {
  const Outcome outcome = testing::run_program("tests/tools/programs/broken_trainer",
                                               with({{"fault", "error"}, {"parallel.ranks", "2"}}));
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err, {"told: [abort] by rank 1: [broken] expected no fault, got one\n",
                                "error: rank 1: [broken] expected no fault, got one\n"}));
}

TEST_F(TrainFaults, ARecordingThatCannotBeWrittenHidesNoError) {
  std::filesystem::create_directories(folder_ / "run/flight.json");
  const Outcome failed = shell(command({{"train.lr", "1e30"}, {"train.warmup", "0"}}));
  EXPECT_EQ(failed.exit_code, 1);
  EXPECT_TRUE(has(failed.err, {"error: ", ": [train]",
                               "\n  what each rank called last could not be "
                               "written: ",
                               "flight.json"}));
}

// Memory
// ------------------------------------------------------------------------------------------------

TEST_F(TrainFaults, MemoryThatRunsOutIsAnErrorAndNoCrash) {
  const std::string shim = std::filesystem::absolute("tests/testing/failing_new_preloaded.so");
  const std::regex kError("^error: (rank [01]: |all 2 ranks: )?\\[");
  int num_failed = 0, num_passed = 0, num_while_loading = 0, num_with_plan = 0;
  flags_["log.peak_ms"] = "1";  // so that memory runs out there, too
  // Every so many allocations, at a distance that has no rhythm with a step's.
  for (const std::string all : {"", "+"}) {
    num_passed = 0;
    for (int n = 3; num_passed < 3; n += n / 50 + 1) {
      ASSERT_LT(n, 10'000'000);
      std::filesystem::remove_all(folder_ / "run");
      const Outcome outcome = shell(
          "exec " + command(), {{"LD_PRELOAD", shim}, {"FAIL_NEW_AFTER", std::to_string(n) + all}});
      ASSERT_TRUE(outcome.exit_code == 0 || outcome.exit_code == 1)
          << n << all << ": " << outcome.exit_code << outcome.err;
      if (outcome.exit_code == 0) {
        ++num_passed;
        continue;
      }
      ++num_failed;
      EXPECT_TRUE(std::regex_search(outcome.err, kError)) << n << all << ": " << outcome.err;
      // oneDNN knows no way out while it is loaded, when nothing has been computed or written.
      const bool is_loading = outcome.err.find("[terminate]") != std::string::npos;
      num_while_loading += is_loading ? 1 : 0;
      EXPECT_TRUE(!is_loading || !std::filesystem::exists(folder_ / "run")) << n << all;
      num_with_plan +=
          has(outcome.err, {"\n    memory of a step, per rank:", "  activation "}) ? 1 : 0;
      EXPECT_EQ(half_written(), "") << n << all;
      EXPECT_EQ(outcome.err.find(" ms, got"), std::string::npos) << n << all << outcome.err;
    }
  }
  EXPECT_GT(num_failed, 100);
  EXPECT_LE(num_while_loading, 5);
  EXPECT_GT(num_with_plan, 20);  // most fail before there is a plan, or find no memory for it
}

TEST_F(TrainFaults, ALimitOfOpenFilesIsAnErrorAndNoCrash) {
  int num_failed = 0, limit = 4;
  for (int exit_code = 1; exit_code != 0; ++limit) {
    ASSERT_LE(limit, 32);  // is enough
    const Outcome outcome = shell("ulimit -n " + std::to_string(limit) + "; exec " + command());
    exit_code = outcome.exit_code;
    if (outcome.err.find("shared librar") != std::string::npos) continue;  // not even loaded
    EXPECT_TRUE(exit_code == 0 || exit_code == 1) << limit << outcome.err;
    if (exit_code == 0) continue;
    ++num_failed;
    EXPECT_TRUE(has(outcome.err, {"error: ", "[", "Too many open files"})) << limit;
    EXPECT_EQ(half_written(), "") << limit;
  }
  EXPECT_GT(num_failed, 2);
}

TEST_F(TrainFaults, ALimitOfAddressSpaceIsAnErrorAndNoCrash) {
  flags_["parallel.ranks"] = "1";
  int num_failed = 0;
  for (int limit_kib = 30'000; limit_kib < 100'000; limit_kib += 3'000) {
    const Outcome outcome = shell("ulimit -v " + std::to_string(limit_kib) + "; exec " + command());
    if (outcome.err.find("shared librar") != std::string::npos) continue;  // not even loaded
    EXPECT_TRUE(outcome.exit_code == 0 || outcome.exit_code == 1) << limit_kib << outcome.err;
    num_failed += outcome.exit_code;
  }
  EXPECT_GT(num_failed, 0);
}

}  // namespace
}  // namespace tessera
