// The trainers as a person meets them: the programs, their flags, files, messages and exit codes.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <initializer_list>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "engine/cuda.h"
#include "tests/testing/errors.h"
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

const std::string kGpt2 = "tests/golden/gpt2_tiny";

class TrainTransformer : public testing::TinyTraining {
 protected:
  /// Exit code 1 and a message that has all `parts`.
  void expect_refused(const Flags& more, std::initializer_list<std::string_view> parts) const {
    const Outcome outcome = run(more);
    std::string what;
    for (const auto& [name, value] : more) what += "--" + name + "=" + value + " ";
    EXPECT_EQ(outcome.exit_code, 1) << what << outcome.err;
    EXPECT_TRUE(outcome.err.starts_with("error: [") ||
                has(outcome.err.substr(0, 40), {"error: ", "rank", ": [memory] "}))
        << what << outcome.err;
    EXPECT_TRUE(has(outcome.err, parts)) << what;
  }
  bool exists(std::string_view name) const { return std::filesystem::exists(folder_ / name); }

  std::vector<json> log_lines() const {
    std::vector<json> lines;
    std::istringstream file(folder_.read("run/log.jsonl"));
    for (std::string line; std::getline(file, line);) lines.push_back(json::parse(line));
    return lines;
  }
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
  /// A copy of the tiny GPT-2 with `from` replaced in its config.json.
  std::string gpt2_with(const std::string& from, const std::string& to) const {
    const std::string copy = folder_ / "gpt2";
    std::filesystem::remove_all(copy);
    std::filesystem::copy(std::filesystem::canonical(kGpt2), copy);
    std::string config = folder_.read("gpt2/config.json");
    const auto at = config.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    std::filesystem::remove(copy + "/config.json");
    folder_.write("gpt2/config.json", config.replace(at, from.size(), to));
    return copy;
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

TEST_F(TrainTransformer, UnknownNamesAreRefusedWithASuggestion) {
  expect_refused({{"train.lrr", "1"}}, {"train.lrr", "did you mean train.lr?"});
  expect_refused({{"parallel.rank", "1"}}, {"parallel.rank", "did you mean parallel.ranks?"});
  expect_refused({{"ranks", "1"}}, {"ranks", "did you mean parallel.ranks?"});
  const std::string path = folder_.write("a.toml", "[train]\nsteps = 3\n\n[model]\nlayer = 2\n");
  expect_refused({{"config", path}}, {path + ":5: model.layer", "did you mean model.layers?"});
  EXPECT_FALSE(exists("run"));
}

TEST_F(TrainTransformer, ValuesOutOfRangeAreRefused) {
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"device", "gpu"},
      {"parallel.ranks", "-1"},
      {"parallel.ranks", "2.5"},
      {"parallel.ranks", "1025"},
      {"parallel.ranks", ""},
      {"parallel.ranks", "99999999999999999999"},
      {"parallel.prefetch", "-1"},
      {"parallel.strategy", "zero9"},
      {"parallel.backend", "mpi"},
      {"parallel.canonical", "yes"},
      {"parallel.deadline_s", "0"},
      {"parallel.reshard_after_forward", "maybe"},
      {"parallel.unit_min_numel", "-1"},
      {"parallel.bucket_mb", "-0.5"},
      {"precision.param", "f16"},
      {"train.steps", "-1"},
      {"train.batch", "0"},
      {"train.accum", "0"},
      {"train.accum_comm", "first"},
      {"train.seed", "-1"},
      {"train.optimizer", "adam"},
      {"train.lr", "nan"},
      {"train.lr", "inf"},
      {"train.lr", "1e400"},
      {"train.lr", "-1"},
      {"train.lr", "3e-3x"},
      {"train.momentum", "1"},
      {"train.weight_decay", "-0.1"},
      {"train.momentum", "0.99999999"},
      {"train.beta1", "1"},
      {"train.beta1", "0.99999999"},
      {"train.beta2", "-1"},
      {"train.beta2", "0.99999999"},
      {"train.eps", "0"},
      {"train.eps", "1e-60"},
      {"train.grad_clip", "-1"},
      {"train.warmup", "-1"},
      {"train.schedule", "step"},
      {"train.recompute", "yes"},
      {"train.recompute", "0"},
      {"train.recompute", "1.5"},
      {"log.every", "-1"},
      {"model.preset", "gpt3"},
      {"model.dim", "-8"},
      {"model.dropout", "1"},
      {"model.dropout", "-0.1"},
      {"model.dropout", "0.99999999"},
      {"data.val_fraction", "1"},
      {"data.order", "random"},
      {"sample.tokens", "-1"}};
  for (const auto& [name, value] : bad) {
    expect_refused({{name, value}}, {"--" + name, "\"" + value + "\""});
  }
  EXPECT_FALSE(exists("run"));
}

TEST_F(TrainTransformer, ValuesThatContradictEachOtherAreRefused) {
  expect_refused({{"model.heads", "3"}}, {"model.heads", "model.dim", "8"});
  expect_refused({{"model.layers", "16777216"}}, {"model.layers", "16777216"});
  expect_refused({{"model.dim", "16777216"}}, {"model.dim", "16777216"});
  expect_refused({{"model.dim", "1048576"}}, {"bytes"});
  expect_refused({{"train.momentum", "0.5"}}, {"train.momentum", "sgd"});
  expect_refused({{"train.momentum", "0.9"}}, {"train.momentum", "sgd"});  // the default, asked for
  expect_refused({{"train.optimizer", "sgd"}, {"train.beta1", "0.8"}}, {"train.beta1", "adamw"});
  expect_refused({{"parallel.strategy", "ddp"}, {"parallel.reshard_after_forward", "true"}},
                 {"reshard_after_forward", "ddp"});
  expect_refused({{"parallel.backend", "nccl"}}, {"parallel.backend=nccl", "device=cpu"});
  expect_refused({{"parallel.canonical", "true"}}, {"parallel.canonical=true", "device=cpu"});
  expect_refused({{"cpu.pin", "true"}, {"cpu.threads_per_rank", "1024"}},
                 {"2 ranks with 1024 threads", "cpu.pin"});
  expect_refused({{"cpu.gemm", "eigen"}, {"cpu.threads_per_rank", "2"}},
                 {"oneDNN for products of 2 threads", "got Eigen"});
  expect_refused({{"train.recompute", "3"}}, {"train.recompute", "the 2 blocks", "got 3"});
  expect_refused({{"out", ""}}, {"(out)"});
  std::filesystem::remove_all(folder_ / "run");
  expect_refused({{"parallel.strategy", "ddp"}, {"parallel.prefetch", "7"}},
                 {"[config]", "parallel.prefetch", "got 7 with parallel.strategy=ddp"});
  expect_refused({{"cuda.tune_gemm", "false"}}, {"[config]", "cuda.tune_gemm on GPUs only"});
  expect_refused({{"cuda.gemm_algorithms", folder_ / "gemms"}},
                 {"[config]", "cuda.gemm_algorithms on GPUs only"});
  expect_refused({{"cuda.attention", "wgmma"}}, {"[config]", "cuda.attention=wgmma on GPUs only"});
  expect_refused({{"log.val_every", "1"}, {"data.val_fraction", "0"}},
                 {"[config]", "log.val_every", "got 1 with data.val_fraction=0"});
  EXPECT_FALSE(exists("run"));
  flags_["device"] = "auto";
  expect_refused({{"parallel.canonical", "true"}, {"parallel.backend", "threads"}},
                 {"parallel.canonical=true", "parallel.backend=threads"});
}

TEST_F(TrainTransformer, AGpuThatIsNotThereIsRefusedBeforeAnythingIsMade) {
  flags_["device"] = "cuda";
  bool has_gpu = false;
  if constexpr (engine::kCudaBuilt) has_gpu = engine::cuda::num_devices() > 0;
  if (has_gpu) {
    EXPECT_EQ(run().exit_code, 0);
    return;
  }
  expect_refused({}, {"[device]", "device=cuda",
                      engine::kCudaBuilt ? "a GPU with a driver" : "a build with CUDA"});
  flags_["device"] = "auto";
  expect_refused({{"parallel.backend", "nccl"}}, {"a GPU for each of 2 ranks", "got 0"});
  EXPECT_FALSE(exists("run"));
  const Outcome outcome = run({{"cpu.gemm", "eigen"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(has(outcome.out, {"device: cpu, 2 ranks, threads, v", ", Eigen 3."}));
}

TEST_F(TrainTransformer, DataThatCannotBeUsedIsNamed) {
  expect_refused({{"data.path", folder_ / "none.txt"}}, {"No such file", folder_ / "none.txt"});
  expect_refused({{"data.path", folder_.path()}}, {"a folder", folder_.path()});
  expect_refused({{"data.path", folder_.write("short.txt", "12345678")}},
                 {"at least 9 tokens", "got 8", folder_ / "short.txt"});
  expect_refused({{"data.path", folder_.write("empty.txt", "")}}, {folder_ / "empty.txt"});
  expect_refused({{"model.vocab", "100"}}, {"vocabulary of 100", "position", folder_ / "text.txt"});
  std::string tokens(400, '\0');
  tokens[300] = 1, tokens[301] = 1;  // token 150 is 257
  const std::string path = folder_.write("tokens.bin", tokens);
  expect_refused({{"data.path", path}}, {"256", "257", "position 150", path});
  EXPECT_EQ(run({{"data.path", path}, {"model.vocab", "258"}}).exit_code, 0);
  tokens.push_back('\0');
  expect_refused({{"data.path", folder_.write("half.bin", tokens)}}, {folder_ / "half.bin"});
}

TEST_F(TrainTransformer, ModelsThatDoNotFitAreRefused) {
  for (const char* size : {"model.layers", "model.heads", "model.dim", "model.seq"}) {
    flags_.erase(size);
  }
  flags_["model.vocab"] = "307";
  flags_["init.from"] = kGpt2;
  EXPECT_EQ(run({{"train.steps", "1"}}).exit_code, 0);
  expect_refused({{"model.dim", "8"}}, {"model.dim of 52", kGpt2, "got 8"});
  expect_refused({{"model.vocab", "256"}}, {"model.vocab of 307", kGpt2, "got 256"});
  expect_refused({{"model.preset", "gpt2"}}, {"model.preset=gpt2", kGpt2});
  expect_refused({{"model.seq", "33"}}, {"model.seq of at most 32", kGpt2, "got 33"});
  EXPECT_EQ(run({{"model.seq", "9"}, {"save.final", folder_ / "short"}}).exit_code, 0);
  EXPECT_TRUE(has(folder_.read("short/config.json"), {"\"n_positions\": 32"}));
  expect_refused({{"init.from", folder_ / "none"}},
                 {"No such file", "none/config.json", "(init.from="});
  expect_refused({{"init.from", gpt2_with("\"n_layer\": 2", "\"n_layer\": 3")}},
                 {"h.2.attn.c_attn.weight", "(52, 156)", "is missing", "h.2.ln_1.bias"});
  expect_refused({{"init.from", gpt2_with("\"n_layer\": 2", "\"n_layer\": 1")}},
                 {"h.1.attn.c_attn.weight", "unexpected"});
  expect_refused({{"init.from", gpt2_with("\"n_layer\": 2", "\"n_layer\": 16777216")}},
                 {"model.layers", "16777216"});
  expect_refused({{"init.from", gpt2_with("\"n_positions\": 32", "\"n_positions\": 33")}},
                 {"wpe.weight", "(32, 52)", "(33, 52)", "model.safetensors"});
  expect_refused({{"init.from", gpt2_with("\"n_embd\": 52", "\"n_embd\": \"52\"")}},
                 {"n_embd", "config.json"});
  expect_refused({{"init.from", gpt2_with("\"gelu_new\"", "\"gelu\"")}},
                 {"activation_function", "gelu", "config.json"});

  const std::string folder = gpt2_with("{", "{");
  const std::string weights = folder_.read("gpt2/model.safetensors");
  const auto with_weights = [&](const std::string& bytes) -> Flags {
    std::filesystem::remove(folder + "/model.safetensors");
    folder_.write("gpt2/model.safetensors", bytes);
    return {{"init.from", folder}};
  };
  const std::string name = folder + "/model.safetensors";
  for (const std::size_t nbytes :
       {std::size_t{0}, std::size_t{7}, std::size_t{100}, weights.size() / 2, weights.size() - 1}) {
    expect_refused(with_weights(weights.substr(0, nbytes)), {"[safetensors]", name});
  }
  expect_refused(with_weights(weights + "x"), {"[safetensors]", name});
  expect_refused(with_weights(std::string(8, '\xff') + weights.substr(8)),
                 {"[safetensors]", "header", name});
  std::string outside = weights;
  const auto offsets = outside.find("data_offsets\":[") + 15;
  outside.replace(offsets, 1, "9");
  expect_refused(with_weights(outside), {"[safetensors]", name});
}

TEST_F(TrainTransformer, WhatCannotBeWrittenIsRefusedBeforeTraining) {
  const std::string file = folder_ / "text.txt";
  expect_refused({{"out", file}}, {"[out]", file});
  expect_refused({{"out", file + "/run"}}, {"[out]", "Not a directory", file + "/run"});
  expect_refused({{"log.jsonl", folder_ / "none/log.jsonl"}}, {folder_ / "none/log.jsonl"});
  expect_refused({{"log.tensorboard", file + "/tb"}}, {"[tensorboard]", file + "/tb"});
  std::filesystem::remove_all(folder_ / "run");
  std::filesystem::create_directories(folder_ / "full/config.json");
  std::filesystem::create_directories(folder_ / "whole/model.safetensors");
  for (const std::string& path : {file, file + "/model", folder_ / "full", folder_ / "whole"}) {
    expect_refused({{"save.final", path}}, {path});
  }
  EXPECT_FALSE(exists("run"));
}

TEST_F(TrainTransformer, WhereCheckpointsCannotBeIsRefusedBeforeTraining) {
  const std::string file = folder_.write("file", "no folder"), name(300, 'a');
  const auto refused = [&](const std::string& folder, const char* reason) {
    expect_refused(
        {{"checkpoint.every", "2"}, {"checkpoint.dir", folder}},
        {"[checkpoint] expected a folder for checkpoints", reason, "(checkpoint.dir, ", folder});
    expect_refused({{"resume", "auto"}, {"checkpoint.dir", folder}},
                   {"[checkpoint]", reason, "(checkpoint.dir, ", folder});
  };
  refused(folder_ / name, "File name too long");
  refused(folder_ / "none/" + name, "File name too long");
  refused(file, "Not a directory");
  refused(file + "/below", "Not a directory");
  EXPECT_FALSE(exists("run/flight.json"));
  EXPECT_FALSE(exists("none"));
}

TEST_F(TrainTransformer, ALossThatIsNotFiniteNamesTheStep) {
  expect_refused({{"train.lr", "1e30"}}, {"finite", "step 2", "rank"});
  expect_refused({{"train.lr", "1e30"}, {"train.optimizer", "sgd"}, {"train.schedule", "constant"}},
                 {"finite", "step 2"});
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

TEST_F(TrainTransformer, FilesAreReadWithCare) {
  const auto refused = [&](std::string_view toml, std::initializer_list<std::string_view> parts) {
    expect_refused({{"config", folder_.write("a.toml", toml)}}, parts);
  };
  refused("[train]\nlr = fast\n", {"a.toml:2"});
  refused("[train]\n\nlr = \"0.1\"\n", {"a.toml:3: train.lr", "number"});
  refused("[train]\nsteps = 1.5\n", {"a.toml:2: train.steps", "integer", "1.5"});
  refused("[train]\nrecompute = \"true\"\n", {"a.toml:2: train.recompute", "true or false"});
  refused("[train]\noptimizer = true\n", {"a.toml:2: train.optimizer", "adamw"});
  refused("out = true\n", {"a.toml:1: out", "text"});
  refused("[trian]\nlr = 1\n", {"a.toml:2: trian.lr", "did you mean train.lr?"});
  refused("[train]\nlr = 1\nlr = 2\n", {"a.toml:3"});
  expect_refused({{"config", folder_ / "none.toml"}}, {"none.toml", "No such file"});
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
  const std::string hash =
      params_sha256({{"train.steps", "5"}, {"train.batch", "8"}, {"log.val_every", "2"}});
  std::vector<json> lines = log_lines();
  // 5 steps, the validations behind the second and the fourth, and the end.
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
    for (std::string line; std::getline(lines, line); ++num_lines) last = json::parse(line);
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
