// The trainers with input that is hostile, missing or absurd: what a person is shown.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "engine/io/text.h"
#include "tests/testing/errors.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/testing/tiny_training.h"

namespace tessera {
namespace {

using testing::Flags;
using testing::has;
using testing::kMlp;
using testing::kTransformer;
using testing::Outcome;
using testing::run_program;
using testing::TempFolder;

class InputFaults : public testing::TinyTraining {
 protected:
  InputFaults() {
    flags_["train.steps"] = "1";
    flags_["parallel.ranks"] = "1";
    flags_["log.every"] = "1";
  }

  /// For what would otherwise run without end.
  Outcome run_for_seconds(int seconds, const Flags& more) const {
    std::vector<std::string> words{std::to_string(seconds),
                                   std::filesystem::absolute(kTransformer).string()};
    for (const auto& [name, value] : with(more)) words.push_back("--" + name + "=" + value);
    return run_program("/usr/bin/timeout", words);
  }
};

/// Whether each of its lines is one that a terminal only shows.
bool is_tame(std::string_view text) {
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    if (engine::escaped(line) != line) return false;
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return true;
}

TEST_F(InputFaults, NamesOfFilesCannotCommandTheTerminal) {
  const std::string name = "a\x1B[2J\nerror: b\xC2\x9B";
  const std::string shown = "a\\x1b[2J\\nerror: b\\u009b";
  std::filesystem::copy(folder_ / "text.txt", folder_ / name);
  const Outcome outcome = run({{"data.path", folder_ / name},
                               {"out", folder_ / (name + "-out")},
                               {"log.jsonl", folder_ / (name + "-log")},
                               {"save.final", folder_ / (name + "-model")}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_TRUE(is_tame(outcome.out)) << outcome.out;
  EXPECT_TRUE(has(outcome.out, {shown + ", ", shown + "-out\n", shown + "-log\n",
                                "model in " + folder_ / (shown + "-model\n")}));
  EXPECT_TRUE(std::filesystem::exists(folder_ / (name + "-model/config.json")));
}

TEST_F(InputFaults, ErrorsCannotCommandTheTerminal) {
  const std::string none = folder_ / "\x1B[2J\nerror: none\x7F";
  const std::string_view shown = "\\x1b[2J\\nerror: none\\x7f";
  const Flags cases[] = {{{"data.path", none}},
                         {{"config", none}},
                         {{"init.from", none}, {"model.layers", "0"}},
                         {{"out", folder_ / "text.txt/\x1B[2J\nerror: none\x7F"}},
                         {{"log.jsonl", none + "/log"}},
                         {{"\x1B[2J\nerror: none\x7F", "1"}},
                         {{"train.lr", "\x1B[2J\nerror: none\x7F"}}};
  for (const Flags& flags : cases) {
    const Outcome outcome = run(flags);
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(is_tame(outcome.err)) << outcome.err;
    EXPECT_TRUE(has(outcome.err, {shown}));
    EXPECT_EQ(outcome.err.find("\nerror"), std::string::npos) << outcome.err;
  }
}

TEST_F(InputFaults, APathIsNeverCutAtANul) {
  const std::string config =
      folder_.write("a.toml", "[data]\npath = \"" + flags_["data.path"] + "\\u0000.evil\"\n");
  flags_.erase("data.path");
  const Outcome outcome = run({{"config", config}});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err, {"without NUL", "text.txt\\x00.evil", "a.toml:2: data.path"}));
}

TEST_F(InputFaults, RunsOfMoreSamplesThanCanBeNumberedAreRefused) {
  const Flags cases[] = {{{"train.steps", "9223372036854775807"}, {"train.accum", "2"}},
                         {{"train.steps", "4611686018427387904"}, {"train.batch", "2"}},
                         {{"train.steps", "4611686018427387904"}, {"train.accum", "4"}},
                         {{"train.steps", "4611686018427387904"}, {"parallel.ranks", "2"}},
                         {{"train.steps", "9007199254740993"}, {"parallel.ranks", "0"}}};
  for (const Flags& flags : cases) {
    const Outcome outcome = run_for_seconds(10, flags);
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(has(outcome.err, {"at most 9223372036854775807 samples"}));
    for (const auto& [name, value] : flags) EXPECT_TRUE(has(outcome.err, {name + "=" + value}));
  }
}

TEST_F(InputFaults, TheTimeLeftOfAHugeRunIsReadable) {
  // The second step ends in a loss that is not finite.
  const Outcome outcome = run({{"train.steps", "9223372036854775807"},
                               {"train.lr", "1e30"},
                               {"train.warmup", "0"},
                               {"train.schedule", "constant"}});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err, {"expected a finite loss", "step 2"}));
  EXPECT_TRUE(has(outcome.out, {"step     1/9223372036854775807 | ", " years\n"})) << outcome.out;
  EXPECT_EQ(outcome.out.find("ETA -"), std::string::npos) << outcome.out;
}

TEST_F(InputFaults, DataThatDoesNotFitNamesTheFlags) {
  const std::string path = folder_.write("short.txt", "123456789");
  const struct {
    Flags flags;
    std::string_view part;
  } cases[] = {{{{"data.val_fraction", "0"}, {"model.vocab", "57"}}, "(model.vocab, "},
               {{{"model.seq", "9"}}, "(model.seq, "},
               {{}, "(model.seq, data.val_fraction, "}};
  for (auto [flags, part] : cases) {
    flags["data.path"] = path;
    const Outcome outcome = run(flags);
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_TRUE(has(outcome.err, {part, path}));
  }
  const Outcome outcome =
      run({{"parallel.strategy", "ddp"}, {"parallel.reshard_after_forward", "true"}});
  EXPECT_TRUE(has(outcome.err, {"parallel.reshard_after_forward=true", "parallel.strategy=ddp"}));
}

TEST_F(InputFaults, DataModelAndFormatThatDoNotBelongTogetherAreRefusedByTrainerAndPlan) {
  Flags model = {{"model.vocab", "600"}, {"data.val_fraction", "0"}, {"train.steps", "0"}};
  model["save.final"] = folder_ / "model";
  ASSERT_EQ(run(model).exit_code, 0);
  std::string ids;
  for (int i = 0; i < 400; ++i) ids += {static_cast<char>(i), static_cast<char>(i % 7 * 20)};
  const std::string tokens = folder_.write("tokens.bin", ids);
  const std::string npy = folder_.write("tokens.npy", "\x93NUMPY\1");
  const Flags from = {{"init.from", folder_ / "model"}, {"data.path", folder_ / "text.txt"},
                      {"parallel.ranks", "1"},          {"train.steps", "1"},
                      {"out", folder_ / "run"},         {"device", "cpu"}};
  const Flags wide = with({{"model.vocab", "119547"}, {"data.path", tokens}});
  for (const std::string program : {"tools/programs/train_transformer", "tools/programs/plan"}) {
    const auto refusal = [&](const Flags& flags) {
      const Outcome outcome = run_program(program, flags);
      EXPECT_EQ(outcome.exit_code, 1) << program;
      return outcome.err;
    };
    EXPECT_TRUE(has(refusal(from), {"got text", "600 tokens", "--data.format=bytes", "init.from"}));
    EXPECT_TRUE(has(refusal(wide), {"119547", "--data.format=uint32"}));
    EXPECT_TRUE(has(refusal(with({{"data.path", npy}})), {"a NumPy .npy file", "tofile("}));
    Flags meant = from;
    meant["data.format"] = "bytes";
    const Outcome outcome = run_program(program, meant);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  }
}

/// The files of a folder and what is in them.
std::map<std::string, std::string> files_in(const TempFolder& parent, const std::string& name) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(parent / name)) {
    const std::string file = entry.path().filename().string();
    files[file] = parent.read(name + "/" + file);
  }
  return files;
}

// Nor does it touch the model that it would have replaced.
TEST_F(InputFaults, AHostileModelLeavesNothingHalfWritten) {
  const std::string shard = "model-00002-of-00003.safetensors";
  ASSERT_EQ(run({{"model.preset", "smollm2-135m"},
                 {"model.kv_heads", "2"},
                 {"model.mlp_dim", "16"},
                 {"model.vocab", "256"},
                 {"train.steps", "0"},
                 {"save.final", folder_ / "whole"},
                 {"save.shard_gib", "2.5e-6"}})
                .exit_code,
            0);
  ASSERT_TRUE(std::filesystem::exists(folder_ / "whole/" + shard));
  for (const char* size : {"model.layers", "model.heads", "model.dim", "model.seq"}) {
    flags_.erase(size);
  }
  std::filesystem::copy(folder_ / "whole", folder_ / "older");
  folder_.write("older/tokenizer.json", "{}");
  const auto older = files_in(folder_, "older");
  const std::string bytes = folder_.read("whole/" + shard);
  std::string deeper = folder_.read("whole/config.json");
  const std::string layers = "\"num_hidden_layers\": ";
  deeper.replace(deeper.find(layers) + layers.size(), 1, "3");
  const struct {
    std::string file, text;
    std::string_view error;
  } cases[] = {
      {shard, bytes.substr(0, bytes.size() / 2), "cut short"},
      {shard, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"},
      {"model.safetensors.index.json",
       R"({"weight_map": {"model.norm.weight": "none.safetensors"}})", "\"model.norm.weight\""},
      {"config.json", deeper, "num_hidden_layers"},
      {"config.json", R"({"model_type": "llama"})", "num_hidden_layers"},
  };
  for (const auto& [file, text, error] : cases) {
    std::filesystem::remove_all(folder_ / "base");
    std::filesystem::copy(folder_ / "whole", folder_ / "base");
    folder_.write("base/" + file, text);
    for (const std::string final : {"older", "new"}) {
      for (const char* name : {"run", "new"}) {
        std::filesystem::remove_all(folder_ / name);
        std::filesystem::create_directory(folder_ / name);
      }
      const Outcome outcome = run({{"init.from", folder_ / "base"},
                                   {"save.final", folder_ / final},
                                   {"checkpoint.every", "1"},
                                   {"parallel.ranks", "2"}});
      EXPECT_EQ(outcome.exit_code, 1) << file;
      EXPECT_TRUE(has(outcome.err, {"error: [", error, folder_ / "base"}));
      EXPECT_EQ(files_in(folder_, "older"), older) << outcome.err;
      EXPECT_TRUE(files_in(folder_, "new").empty()) << outcome.err;
      for (const auto& [name, log] : files_in(folder_, "run")) {  // of a run without a step
        EXPECT_TRUE((name == ".lock" || name == "log.jsonl") && log.empty()) << name;
      }
    }
  }
  // Nothing else stood in its way.
  const Outcome outcome = run({{"init.from", folder_ / "whole"},
                               {"save.final", folder_ / "older"},
                               {"checkpoint.every", "1"},
                               {"parallel.ranks", "2"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_NE(files_in(folder_, "older"), older);
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run/checkpoints"));
}

TEST_F(InputFaults, AVocabularyFarAboveTheDataIsAWarning) {
  const Flags large = with({{"model.vocab", "5000"}});
  const std::vector<std::string_view> warning = {"warning: the model has 5,000 tokens",
                                                 "--model.vocab=256"};
  for (const std::string_view part : warning) {
    EXPECT_TRUE(has(run(large).out, {part}));
    EXPECT_TRUE(has(run_program("tools/programs/plan", large).out, {part}));
  }
  EXPECT_EQ(run().out.find("warning"), std::string::npos);
}

TEST_F(InputFaults, OutsideOfBazelRunAProgramFindsDataBesideItselfOrSaysHowToGetThem) {
  // A copy, as what Bazel built has its data beside it.
  const auto started_elsewhere = [&](const std::string& program, const std::string& more = "") {
    std::filesystem::copy_file(program, folder_ / "program",
                               std::filesystem::copy_options::overwrite_existing);
    return run_program(
        "/bin/sh", std::vector<std::string>{"-c", "cd " + folder_.path() +
                                                      " && ./program --device=cpu --train.steps=0 "
                                                      "--log.peak_ms=0 --out=run" +
                                                      more});
  };
  const Outcome transformer = started_elsewhere(kTransformer);
  EXPECT_EQ(transformer.exit_code, 1);
  EXPECT_TRUE(has(transformer.err, {"bazel run", "third_party/data/kjv.txt", "--data.path=FILE",
                                    "bible-kjv", "bible -f"}));
  const Outcome mlp = started_elsewhere(kMlp);
  EXPECT_EQ(mlp.exit_code, 1);
  EXPECT_TRUE(has(mlp.err, {"bazel run", "third_party/data/fashion_mnist", "--data.path=FOLDER",
                            "/usr/share/datasets/fashion-mnist", "dataset-fashion-mnist"}));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run"));
  std::filesystem::create_directories(folder_ / "program.runfiles/us/third_party/data");
  folder_.write("program.runfiles/us/third_party/data/kjv.txt",
                folder_.read("text.txt") + folder_.read("text.txt"));
  const Outcome found = started_elsewhere(
      kTransformer, " --sample.tokens=0 --model.layers=1 --model.heads=1 --model.dim=8");
  EXPECT_EQ(found.exit_code, 0) << found.err;
  EXPECT_TRUE(has(found.out, {"/program.runfiles/us/third_party/data/kjv.txt"}));
}

}  // namespace
}  // namespace tessera
