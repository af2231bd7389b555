// What the trainers refuse before they train: values, files, models and machines that do not fit.
#include <gtest/gtest.h>

#include <cstddef>
#include <filesystem>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/cuda.h"
#include "tests/testing/errors.h"
#include "tests/testing/program.h"
#include "tests/tools/testing/tiny_training.h"

namespace tessera {
namespace {

using testing::Flags;
using testing::has;
using testing::Outcome;

const std::string kGpt2 = "tests/golden/gpt2_tiny";

class TrainRefusals : public testing::TinyTraining {
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

TEST_F(TrainRefusals, UnknownNamesAreRefusedWithASuggestion) {
  expect_refused({{"train.lrr", "1"}}, {"train.lrr", "did you mean train.lr?"});
  expect_refused({{"parallel.rank", "1"}}, {"parallel.rank", "did you mean parallel.ranks?"});
  expect_refused({{"ranks", "1"}}, {"ranks", "did you mean parallel.ranks?"});
  const std::string path = folder_.write("a.toml", "[train]\nsteps = 3\n\n[model]\nlayer = 2\n");
  expect_refused({{"config", path}}, {path + ":5: model.layer", "did you mean model.layers?"});
  EXPECT_FALSE(exists("run"));
}

TEST_F(TrainRefusals, ValuesOutOfRangeAreRefused) {
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

TEST_F(TrainRefusals, ValuesThatContradictEachOtherAreRefused) {
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

TEST_F(TrainRefusals, AGpuThatIsNotThereIsRefusedBeforeAnythingIsMade) {
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

TEST_F(TrainRefusals, DataThatCannotBeUsedIsNamed) {
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

TEST_F(TrainRefusals, ModelsThatDoNotFitAreRefused) {
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

// Of 32 positions, of which a token sees the 20 before it alone.
TEST_F(TrainRefusals, ASequenceIsNoLongerThanTheWindowOfMistral) {
  for (const char* size : {"model.layers", "model.heads", "model.dim", "model.seq"}) {
    flags_.erase(size);
  }
  const std::string mistral = "tests/golden/llama/mistral_window";
  flags_["model.vocab"] = "37";
  flags_["data.path"] = folder_.write("tokens.bin", std::string(400, '\0'));
  flags_["init.from"] = mistral;
  expect_refused({{"model.seq", "21"}}, {"model.seq of at most 20", mistral, "got 21"});
  expect_refused({{"model.seq", "32"}}, {"model.seq of at most 20", mistral, "got 32"});
  EXPECT_FALSE(exists("run"));
  for (const Flags& fits : {Flags{{"model.seq", "20"}}, Flags{}}) {
    const Outcome outcome = run(fits);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  }
}

TEST_F(TrainRefusals, WhatCannotBeWrittenIsRefusedBeforeTraining) {
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

TEST_F(TrainRefusals, WhereCheckpointsCannotBeIsRefusedBeforeTraining) {
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

TEST_F(TrainRefusals, ALossThatIsNotFiniteNamesTheStep) {
  expect_refused({{"train.lr", "1e30"}}, {"finite", "step 2", "rank"});
  expect_refused({{"train.lr", "1e30"}, {"train.optimizer", "sgd"}, {"train.schedule", "constant"}},
                 {"finite", "step 2"});
}

TEST_F(TrainRefusals, FilesAreReadWithCare) {
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

}  // namespace
}  // namespace tessera
