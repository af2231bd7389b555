// The trainers as a person meets them: the programs, their flags, files, messages and exit codes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/io/event_reader.h"
#include "tests/tools/testing/tiny_training.h"

namespace tessera {
namespace {

using nlohmann::json;
using testing::Flags;
using testing::has;
using testing::kMlp;
using testing::kTransformer;
using testing::Outcome;
using testing::run_program;
using testing::TempFolder;

class TrainTransformer : public testing::TinyTraining {
 protected:
  /// Trains; returns the hash in the last line of the log.
  std::string params_sha256(const Flags& more = {}) const {
    const Outcome outcome = run(more);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    const std::vector<json> lines = log_lines();
    if (lines.empty() || !lines.back().contains("final")) return "no final line";
    const std::string hash = lines.back()["final"]["params_sha256"];
    EXPECT_EQ(hash.size(), 64u);
    EXPECT_TRUE(has(outcome.out, {hash}));
    return hash;
  }
};

TEST_F(TrainTransformer, HelpShowsEveryDefault) {
  for (const std::string& program : {kTransformer, kMlp}) {
    const Outcome outcome = run_program(program, std::vector<std::string>{"--help"});
    EXPECT_EQ(outcome.exit_code, 0);
    EXPECT_EQ(outcome.err, "");
    EXPECT_TRUE(has(outcome.out, {"Usage: train_", "--config FILE", "--parallel.ranks=",
                                  "--parallel.strategy=\"zero3\"", "--parallel.prefetch=1",
                                  "--train.optimizer=\"adamw\"", "--train.grad_clip=1",
                                  "--train.seed=1337", "--out=\"runs/train_"}));
  }
  // The values in force without flags are the defaults of the help.
  const Outcome help = run_program(kTransformer, std::vector<std::string>{"--help"});
  ASSERT_EQ(run().exit_code, 0);
  std::istringstream toml(folder_.read("run/config.toml"));
  std::string section;
  int num_defaults = 0;
  for (std::string line; std::getline(toml, line);) {
    if (line.starts_with('[')) section = line.substr(1, line.size() - 2) + ".";
    const auto equals = line.find(" = ");
    if (equals == std::string::npos) continue;
    const std::string name = section + line.substr(0, equals);
    const bool is_default = !flags_.contains(name);
    EXPECT_TRUE(
        has(help.out, {"\n  --" + name + "=" + (is_default ? line.substr(equals + 3) : "")}));
    num_defaults += is_default ? 1 : 0;
  }
  EXPECT_GT(num_defaults, 25);
}

// Without flags the loss does not leap: with a peak of 4e-3 after 20 steps it went from 3.8 to 6.6.
TEST_F(TrainTransformer, RisesToItsPeakRateOverTheFirstFiftySteps) {
  ASSERT_EQ(run().exit_code, 0);
  for (const json& line : log_lines()) {
    if (!line.contains("lr")) continue;
    EXPECT_NEAR(line.at("lr").get<double>(), 4e-3 * line.at("step").get<double>() / 50, 1e-9);
  }
  EXPECT_EQ(log_lines().size(), 4u);
  EXPECT_TRUE(has(folder_.read("run/config.toml"), {"\nlr = 0.004\n", "\nwarmup = 50\n"}));
}

TEST_F(TrainTransformer, FlagsBeatTheFileAndTheFileBeatsDefaults) {
  const std::string file = folder_.write("a.toml",
                                         "[train]\nwarmup = 7\nlr = 0.25\nsteps = 99\n"
                                         "[parallel]\nreshard_after_forward = true\n");
  ASSERT_EQ(run({{"config", file}, {"train.lr", "0.5"}}).exit_code, 0);
  EXPECT_TRUE(has(folder_.read("run/config.toml"),
                  {"\nwarmup = 7\n", "\nlr = 0.5\n", "\nsteps = 3\n", "\naccum = 1\n",
                   "\nreshard_after_forward = \"true\"\n"}));
  EXPECT_EQ(log_lines().size(), 4u);
}

TEST_F(TrainTransformer, FlagsAndFileTrainTheSameModel) {
  const std::string by_flags = params_sha256({{"train.accum", "2"}, {"model.dropout", "0.1"}});
  const std::string saved = folder_.write("saved.toml", folder_.read("run/config.toml"));
  flags_.clear();
  EXPECT_EQ(params_sha256({{"config", saved}}), by_flags);
  EXPECT_EQ(folder_.read("run/config.toml"), folder_.read("saved.toml"));
  EXPECT_NE(params_sha256({{"config", saved}, {"train.seed", "1"}}), by_flags);
}

TEST_F(TrainTransformer, LogsEveryStep) {
  flags_.erase("log.peak_ms");
  const std::string hash =
      params_sha256({{"train.steps", "5"}, {"train.batch", "8"}, {"log.val_every", "2"}});
  std::vector<json> lines = log_lines();
  // 5 steps, the validations after the second and the fourth, and the end.
  ASSERT_EQ(lines.size(), 8u);
  for (const std::ptrdiff_t at : {5, 2}) {
    const json& validation = lines[static_cast<std::size_t>(at)];
    EXPECT_EQ(validation.size(), 2u) << validation;
    EXPECT_EQ(validation.at("step"), at == 2 ? 2 : 4);
    EXPECT_NEAR(validation.at("val_loss").get<double>(), 5.545, 0.3);
    lines.erase(lines.begin() + at);
  }
  for (std::size_t step = 0; step < 5; ++step) {
    const json& line = lines[step];
    EXPECT_EQ(line.size(), 14u) << line;
    EXPECT_GT(line.at("num_collectives").get<int>(), 0);
    EXPECT_GT(line.at("sent_bytes").get<std::int64_t>(), 0);
    EXPECT_EQ(line.at("step"), step + 1);
    EXPECT_NEAR(line.at("loss").get<double>(), 5.545, 0.3);  // ln 256
    EXPECT_GT(line.at("grad_norm").get<double>(), 0);
    EXPECT_GT(line.at("lr").get<double>(), 0);
    EXPECT_GT(line.at("step_ms").get<double>(), 0);
    EXPECT_GT(line.at("tokens_per_s").get<double>(), 0);
    EXPECT_GE(line.at("exposed_comm_ms").get<double>(), 0);
    EXPECT_GT(line.at("compute_ms").get<double>(), 0);
    EXPECT_GT(line.at("optimizer_ms").get<double>(), 0);
    EXPECT_GE(line.at("data_ms").get<double>(), 0);
    EXPECT_GT(line.at("peak_percent").get<double>(), 0);
    std::int64_t largest = 0;
    for (const char* category : {"parameter_shard", "gathered_parameter", "gradient", "optimizer",
                                 "activation", "communication", "workspace"}) {
      const std::int64_t peak = line.at("peak_bytes").at(category);
      EXPECT_GE(peak, 0) << category;
      largest = std::max(largest, peak);
    }
    const auto peak_of = [&](const char* category) {
      return line.at("peak_bytes").at(category).get<std::int64_t>();
    };
    EXPECT_GE(peak_of("total"), largest);
    // What a step needs most of comes on top of what is there always.
    EXPECT_GE(peak_of("total"),
              peak_of("parameter_shard") + peak_of("optimizer") + peak_of("activation"));
  }
  const json& final = lines.back().at("final");
  EXPECT_EQ(final.at("params_sha256"), hash);
  EXPECT_EQ(final.at("device"), "cpu");
  EXPECT_EQ(final.at("ranks"), 2);
  EXPECT_EQ(final.at("backend"), "threads");
  EXPECT_NEAR(final.at("val_loss").get<double>(), 5.545, 0.3);
  params_sha256({{"data.val_fraction", "0"}});
  EXPECT_TRUE(log_lines().back().at("final").at("val_loss").is_null());
}

TEST_F(TrainTransformer, TellsTensorBoardWhatItLogs) {
  ASSERT_EQ(run({{"log.tensorboard", folder_ / "tb"}, {"log.val_every", "2"}}).exit_code, 0);
  const std::filesystem::directory_iterator files(folder_ / "tb");
  const std::string name = "tb/" + files->path().filename().string();
  std::map<std::int64_t, float> losses, validations;
  for (const auto& event : testing::EventReader::read(folder_.read(name))) {
    const auto add = [&](const char* tag, std::map<std::int64_t, float>& values) {
      if (const auto at = event.scalars.find(tag); at != event.scalars.end()) {
        values[event.step] = at->second;
      }
    };
    add("train/loss", losses);
    add("validation/val_loss", validations);
  }
  std::map<std::int64_t, float> logged, validated;
  for (const json& line : log_lines()) {
    if (line.contains("loss")) logged[line.at("step")] = line.at("loss").get<float>();
    if (line.contains("val_loss")) validated[line.at("step")] = line.at("val_loss").get<float>();
  }
  validated[3] = log_lines().back().at("final").at("val_loss").get<float>();
  EXPECT_EQ(logged.size(), 3u);
  EXPECT_EQ(losses, logged);
  EXPECT_EQ(validations.size(), 2u);
  EXPECT_EQ(validations, validated);
}

TEST_F(TrainTransformer, SumsUpItsSteps) {
  flags_.erase("log.peak_ms");
  const Outcome outcome = run({{"train.steps", "20"}});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(
      has(outcome.out, {"\nsummary\n  steps   18 measured, 2 before them left out\n",
                        " the peak measured at the start", " at the peak of rank 0, planned "}));
  const std::vector<json> lines = log_lines();
  const json summary = lines.back().at("final").at("summary");
  EXPECT_EQ(summary.at("steps"), 18);
  EXPECT_EQ(summary.at("peak_bytes"), lines[19].at("peak_bytes").at("total"));
  std::vector<double> step_ms;
  double shares = 0;
  for (std::size_t i = 2; i < 20; ++i) step_ms.push_back(lines[i].at("step_ms"));
  std::sort(step_ms.begin(), step_ms.end());
  EXPECT_DOUBLE_EQ(summary.at("step_ms").at("median"), (step_ms[8] + step_ms[9]) / 2);
  for (const auto& [part, share] : summary.at("share").items()) shares += share.get<double>();
  EXPECT_NEAR(shares, 1, 1e-9);
  EXPECT_EQ(summary.at("share").size(), 5u);
  const Outcome quiet = run({{"log.peak_ms", "0"}});
  EXPECT_EQ(quiet.out.find("of the peak"), std::string::npos) << quiet.out;
  EXPECT_FALSE(log_lines().front().contains("peak_percent"));
}

TEST_F(TrainTransformer, SaysWhatACommunicationHookSendsAndRemembers) {
  const Outcome outcome = run({{"comm.hook", "bf16+powersgd"}, {"powersgd.start_step", "1"}});
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  // Four matrices of each layer, and both embeddings.
  EXPECT_TRUE(has(outcome.out, {"comm hook bf16+powersgd: rank 1, start_step 1",
                                "10 of 28 parameters compressed", "errors remembered per rank"}));
  const std::string table = folder_.read("run/comm_hook.txt");
  EXPECT_TRUE(
      has(table, {"h.1.mlp.c_fc.weight              (8, 32)                  1           1024"
                  "             80      12.8x"}))
      << table;
  const json end = log_lines().back().at("final");
  EXPECT_LT(end.at("comm_hook_bytes_after"), end.at("comm_hook_bytes_before"));
  EXPECT_GT(end.at("comm_hook_error_bytes"), 0);

  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3", "hsdp", "hybrid_zero2", "hfsdp"}) {
    const Outcome noop = run({{"comm.hook", "noop"},
                              {"parallel.strategy", strategy},
                              {"parallel.ranks", "4"},
                              {"train.grad_clip", "0"}});
    EXPECT_EQ(noop.exit_code, 0) << strategy << noop.err;
    EXPECT_TRUE(has(noop.out, {"GRADIENTS ARE NOT REDUCED", "worthless"}));
  }
}

TEST_F(TrainTransformer, SaysHowManyRanksAReplicaHas) {
  const Flags hybrid = {{"parallel.strategy", "hsdp"}, {"parallel.ranks", "3"}};
  const std::string warning = "warning: hsdp on 3 ranks has replicas of 1 rank: nothing is cut";
  const Outcome alone = run(hybrid);
  EXPECT_EQ(alone.exit_code, 0) << alone.err;
  EXPECT_TRUE(has(alone.out, {", hsdp on 3 ranks, replicas of 1\n", warning})) << alone.out;
  Flags more = hybrid;
  more["parallel.ranks"] = "4";
  const Outcome pairs = run(more);
  EXPECT_TRUE(has(pairs.out, {", hsdp on 4 ranks, replicas of 2\n"})) << pairs.out;
  EXPECT_EQ(pairs.out.find("warning"), std::string::npos) << pairs.out;
  Flags plan = hybrid;
  plan["plan"] = "true";
  EXPECT_TRUE(run(plan).out.starts_with(warning));
}

TEST_F(TrainTransformer, ASavedModelIsTheTrainedOne) {
  const std::string model = folder_ / "some/where/model";
  const std::string trained = params_sha256({{"save.final", model}});
  EXPECT_TRUE(exists("some/where/model/config.json"));
  EXPECT_TRUE(exists("some/where/model/model.safetensors"));
  for (const char* strategy : {"ddp", "zero3"}) {
    EXPECT_EQ(params_sha256({{"init.from", model},
                             {"train.steps", "0"},
                             {"parallel.strategy", strategy},
                             {"parallel.ranks", "3"}}),
              trained);
  }
  EXPECT_NE(params_sha256({{"train.steps", "0"}}), trained);
}

TEST_F(TrainTransformer, RanksMayOutnumberWhatThereIsToShare) {
  const Flags tiny = {
      {"model.layers", "1"}, {"model.dim", "6"}, {"model.heads", "3"}, {"train.steps", "2"}};
  for (const char* ranks : {"7", "33"}) {
    Flags flags = tiny;
    flags["parallel.ranks"] = ranks;
    const std::string zero3 = params_sha256(flags);
    flags["parallel.strategy"] = "ddp";
    EXPECT_EQ(params_sha256(flags), zero3) << ranks;
  }
}

TEST_F(TrainTransformer, GeneratesTextThatASeedRepeats) {
  const Flags flags = {{"sample.tokens", "20"}};
  EXPECT_TRUE(has(run(flags).out, {"generated", "sha256"}));
  const std::string sample = folder_.read("run/sample.txt");
  // The first byte of the text, 20 bytes, of which the last three may be of a cut character, or
  // more where they are escaped, and a newline.
  EXPECT_GE(sample.size(), 19u);
  EXPECT_TRUE(sample.starts_with('I') && sample.ends_with('\n')) << sample;
  run({{"sample.tokens", "20"}, {"parallel.ranks", "1"}, {"train.accum", "2"}});
  EXPECT_EQ(folder_.read("run/sample.txt"), sample);
  for (const char* strategy : {"ddp", "zero2", "hfsdp"}) {
    run({{"sample.tokens", "20"}, {"parallel.strategy", strategy}});
    EXPECT_EQ(folder_.read("run/sample.txt"), sample) << strategy;
  }
}

// With a budget no keys and values are kept, and each token is drawn from a forward over all.
TEST_F(TrainTransformer, GeneratesWithKeysAndValuesWhatItDoesWithout) {
  const Flags flags = {{"sample.tokens", "40"}, {"model.seq", "32"}};
  run(flags);
  const std::string sample = folder_.read("run/sample.txt");
  Flags limited = flags;
  limited["memory_budget"] = "1GiB";
  const Outcome outcome = run(limited);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(folder_.read("run/sample.txt"), sample);
}

TEST_F(TrainTransformer, PathsAreRelativeToWhereThePersonStands) {
  folder_.write("a.toml", "[train]\nsteps = 1\n");
  flags_["data.path"] = "text.txt";
  flags_["out"] = "here/run";
  flags_["config"] = "a.toml";
  flags_["save.final"] = "model";
  flags_["log.jsonl"] = "lines.jsonl";
  const Flags environment = {{"BUILD_WORKING_DIRECTORY", folder_.path()}};
  const Outcome saved = run_program(kTransformer, flags_, environment);
  EXPECT_EQ(saved.exit_code, 0) << saved.err;
  for (const char* path : {"here/run/config.toml", "model/config.json", "lines.jsonl"}) {
    EXPECT_TRUE(exists(path)) << path;
  }
  flags_["init.from"] = "model";
  EXPECT_EQ(run_program(kTransformer, flags_, environment).exit_code, 0);
}

TEST_F(TrainTransformer, OutputThatIsLostIsAnError) {
  std::string command = kTransformer;
  flags_["log.every"] = "1";
  for (const auto& [name, value] : flags_) command += " --" + name + "=" + value;
  const auto shell = [](const std::string& line) {
    return run_program("/bin/sh", std::vector<std::string>{"-c", line});
  };
  for (const std::string& line : {kTransformer + " --help > /dev/full", command + " > /dev/full",
                                  command + " >&-", kTransformer + " --help >&-"}) {
    const Outcome outcome = shell(line);
    EXPECT_EQ(outcome.exit_code, 1) << line;
    EXPECT_TRUE(has(outcome.err, {"error: "})) << line;
  }
  EXPECT_EQ(shell(command + " >&- 2>&-").exit_code, 1);
  // A reader that has gone, and a limit on the size of files.
  const std::string status = folder_ / "status";
  shell("(" + command + "; echo $? >" + status + ") | true");
  EXPECT_EQ(folder_.read("status"), "1\n");
  EXPECT_EQ(shell("ulimit -f 0; " + command).exit_code, 1);
}

TEST_F(TrainTransformer, ThreadsThatCannotStartAreAnError) {
  flags_["parallel.ranks"] = "1000";
  flags_["memory_check"] = "false";  // or the limit is noticed before
  std::string line = "ulimit -v 600000; " + kTransformer;
  for (const auto& [name, value] : flags_) line += " --" + name + "=" + value;
  const Outcome outcome = run_program("/bin/sh", std::vector<std::string>{"-c", line});
  EXPECT_EQ(outcome.exit_code, 1) << outcome.err;
  EXPECT_TRUE(has(outcome.err, {"error: [", "expected to start"}));
}

TEST(TrainMlp, TrainsAndLogsItsAccuracy) {
  const TempFolder folder;
  Flags flags = {{"model.hidden", "16"}, {"train.steps", "20"}, {"train.warmup", "0"},
                 {"train.lr", "0.01"},   {"log.every", "0"},    {"out", folder.path()},
                 {"device", "cpu"}};
  std::string hashes[2];
  for (int i = 0; i < 2; ++i) {
    flags["parallel.strategy"] = i == 0 ? "zero3" : "ddp";
    const Outcome outcome = run_program(kMlp, flags);
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    std::istringstream lines(folder.read("log.jsonl"));
    json last;
    int num_lines = 0;
    for (std::string line; std::getline(lines, line); ++num_lines) last = testing::parse_json(line);
    EXPECT_EQ(num_lines, 21);
    EXPECT_GT(last.at("final").at("test_accuracy").get<double>(), 0.4);
    EXPECT_LT(last.at("final").at("val_loss").get<double>(), 2);
    hashes[i] = last.at("final").at("params_sha256");
  }
  EXPECT_EQ(hashes[0], hashes[1]);
}

TEST(TrainMlp, RefusesWhatItCannotDo) {
  const TempFolder folder;
  const auto refused = [&](const Flags& flags, std::initializer_list<std::string_view> parts) {
    const Outcome outcome = run_program(kMlp, flags);
    EXPECT_EQ(outcome.exit_code, 1) << outcome.err;
    EXPECT_TRUE(has(outcome.err, parts));
  };
  const std::string out = folder / "run";
  refused({{"out", out}, {"model.hiden", "1"}}, {"did you mean model.hidden?"});
  refused({{"out", out}, {"model.layers", "0"}}, {"--model.layers"});
  refused({{"out", out}, {"data.path", folder.path()}}, {folder.path()});
  refused({{"out", out}, {"model.hidden", "16777216"}}, {"bytes"});
  refused({{"out", out}, {"model.layers", "1"}, {"model.hidden", "8"}},
          {"[config]", "model.hidden with model.layers above 1", "got 8 with 1"});
  refused({{"out", out}, {"device", "cpu"}, {"cuda.tune_gemm", "false"}},
          {"[config]", "cuda.tune_gemm on GPUs only"});
  refused({{"out", out}, {"train.lr", "1e30"}, {"train.warmup", "0"}, {"log.every", "0"}},
          {"finite", "step 2"});
}

}  // namespace
}  // namespace tessera
