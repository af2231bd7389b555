// docs/finetune.md: its commands, one after the other, with a small model.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <vector>

#include "tests/docs/pages.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kTokenizer = "tests/golden/tokenizers/1_bytes/tokenizer.json";

// Lines that end with \ are joined.
std::vector<std::string> commands() {
  std::vector<std::string> all;
  bool goes_on = false;
  for (std::string line : lines_of("docs/finetune.md")) {
    line.erase(0, std::min(line.find_first_not_of(' '), line.size()));
    if (!goes_on && !line.starts_with("bazel run ")) continue;
    if (!goes_on) all.emplace_back();
    all.back() += line;
    goes_on = all.back().ends_with('\\');
    if (goes_on) all.back().pop_back();
  }
  return all;
}

class Finetune : public ::testing::Test {
 protected:
  // What a person has who begins.
  Finetune() {
    const Outcome made =
        run_program("tools/programs/train_transformer", Flags{{"model.preset", "smollm2-135m"},
                                                              {"model.layers", "2"},
                                                              {"model.heads", "2"},
                                                              {"model.kv_heads", "1"},
                                                              {"model.dim", "16"},
                                                              {"model.mlp_dim", "24"},
                                                              {"model.seq", "512"},
                                                              {"model.vocab", "556"},
                                                              {"data.path", text("bytes.txt")},
                                                              {"train.steps", "0"},
                                                              {"train.batch", "1"},
                                                              {"sample.tokens", "0"},
                                                              {"device", "cpu"},
                                                              {"out", folder_ / "made"},
                                                              {"save.final", folder_ / "model"}});
    EXPECT_EQ(made.exit_code, 0) << made.err;
    fs::copy(kTokenizer, folder_ / "model/tokenizer.json");
    json config = parse_json(folder_.read("model/config.json"));
    config["eos_token_id"] = 1;
    folder_.write("model/config.json", json_text(config));
    std::string lines;
    for (int i = 0; i < 300; ++i) {
      lines += json_text(json{{"text", fmt::format("Story {}: once upon a time.", i)},
                              {"question", fmt::format("What is {}? ", i)},
                              {"answer", fmt::format("One more than {}.", i - 1)}}) +
               "\n";
    }
    folder_.write("train.jsonl", lines);
  }

  std::string text(const std::string& name) {
    std::string words;
    while (words.size() < 4000) words += "In the beginning. ";
    folder_.write(name, words);
    return folder_ / name;
  }

  Outcome run(const std::string& command) {
    std::vector<std::string> arguments;
    std::string word;
    bool is_quoted = false;
    for (const char c : command + " ") {
      if (c == '\'') is_quoted = !is_quoted;
      if (c == '\'' || (c == ' ' && word.empty())) continue;
      if (c != ' ' || is_quoted) {
        word += c;
        continue;
      }
      arguments.push_back(
          std::regex_replace(word, std::regex("(^|=)/data/"), "$1" + folder_.path() + "/"));
      word.clear();
    }
    const std::string name = arguments.at(2).substr(std::string("//tools:").size());
    arguments.erase(arguments.begin(), arguments.begin() + 4);
    if (name == "train_transformer") {
      for (std::string& argument : arguments) {
        if (argument.starts_with("--train.steps=")) argument = "--train.steps=3";
        if (argument.starts_with("--train.warmup=")) argument = "--train.warmup=1";
        if (argument.starts_with("--checkpoint.every=")) argument = "--checkpoint.every=2";
      }
      arguments.emplace_back("--device=cpu");
    }
    const bool is_program = name == "train_transformer" || name == "plan";
    return run_program((is_program ? "tools/programs/" : "tools/" + name + "/") + name, arguments);
  }

  const TempFolder folder_;
};

// With texts, or with questions and answers.
TEST_F(Finetune, EveryCommandOfThePageRunsInItsOrder) {
  const std::vector<std::string> all = commands();
  ASSERT_EQ(all.size(), 8u);
  for (const std::string left_out : {" --prompt=question ", " --field=text "}) {
    fs::remove_all(folder_ / "run");
    fs::remove_all(folder_ / "tuned");
    for (const char* of_lora : {"lora", "adapter", "merged"}) fs::remove_all(folder_ / of_lora);
    int num_run = 0;
    for (const std::string& command : all) {
      if (command.find(left_out) != std::string::npos) continue;
      const Outcome outcome = run(command);
      ASSERT_EQ(outcome.exit_code, 0) << command << "\n" << outcome.err;
      ++num_run;
    }
    EXPECT_EQ(num_run, 7);
  }
  EXPECT_EQ(folder_.read("tuned/tokenizer.json"), folder_.read("model/tokenizer.json"));
  EXPECT_EQ(folder_.read("merged/tokenizer.json"), folder_.read("model/tokenizer.json"));
  EXPECT_NE(folder_.read("merged/model.safetensors"), folder_.read("model/model.safetensors"));
  EXPECT_NE(folder_.read("tuned/model.safetensors"), folder_.read("model/model.safetensors"));
  EXPECT_EQ(parse_json(folder_.read("tuned/config.json")),
            parse_json(folder_.read("model/config.json")));
}

}  // namespace
}  // namespace tessera::testing
