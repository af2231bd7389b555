// The program: its texts are those of forwards over all tokens, on any number of ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/copy.h"
#include "engine/dtype.h"
#include "engine/elementwise.h"
#include "engine/tape.h"
#include "shard/fsdp.h"
#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/tokenizer/small_tokenizer.h"
#include "tools/decoding/sampler.h"
#include "tools/models/family.h"
#include "tools/models/key_value_cache.h"
#include "tools/tokenizer/tokenizer.h"
#include "tools/weights/adapter_files.h"
#include "tools/weights/model_files.h"

namespace tessera::tools {
namespace {

using engine::Tensor;
using nlohmann::json;
using testing::has;
using testing::Outcome;
using Ids = std::vector<std::int32_t>;

// A golden model of 37 tokens and 32 positions, with a tokenizer of 10 beside it.
class Generate : public ::testing::Test {
 protected:
  Generate() {
    for (const char* name : {"config.json", "model.safetensors"}) {
      std::filesystem::copy_file(std::string("tests/golden/llama/llama_biases/") + name,
                                 folder_ / name);
    }
    folder_.write("tokenizer.json", testing::small_tokenizer().dump());
  }

  Outcome run(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), "--from=.");
    return testing::run_program("tools/generate/generate", arguments,
                                {{"BUILD_WORKING_DIRECTORY", folder_.path()}});
  }
  std::vector<json> records(std::vector<std::string> arguments) const {
    arguments.emplace_back("--json");
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    std::vector<json> records;
    std::istringstream lines(outcome.out);
    for (std::string line; std::getline(lines, line);) records.push_back(testing::parse_json(line));
    return records;
  }

  /// What follows `prompt`, without any end: in f32 from forwards that keep nothing, in bf16, where
  /// more is lost by rounding, from those that do.
  Ids expected(Ids tokens, std::int64_t count, const Sampling& sampling = {},
               std::uint64_t number = 0, engine::DType param = engine::DType::kF32) const {
    const auto before = tokens.size();
    comm::run_ranks(1, {}, [&](comm::ProcessGroup& world) {
      const engine::Memory memory;
      engine::Tape tape(memory, engine::Stream::inline_cpu("compute"));
      const auto model = read_model_config(folder_.path()).make();
      shard::Fsdp fsdp(world, memory, tape.stream(), model->blocks(), model->root(),
                       {.precision = {.param = param}});
      load_model(fsdp, *model, folder_.path());
      Sampler sampler(sampling, number);
      KeyValueCache cache(model->max_tokens());
      for (std::int64_t i = 0; i < count; ++i) {
        const bool keeps = param == engine::DType::kBF16;
        const Ids unread = keeps && i > 0 ? Ids{tokens.back()} : tokens;
        const Tensor input =
            Tensor::from<std::int32_t>(memory, {1, std::ssize(unread)}, unread, "tokens");
        const Tensor next = keeps ? model->next_token_logits(tape, input, cache)
                                  : model->next_token_logits(tape, input);
        const Tensor f32 = Tensor::empty(memory, next.shape(), engine::DType::kF32, "logits");
        engine::cast(f32, next);
        const auto logits = engine::to_vector<float>(f32);
        tokens.push_back(sampler.next(std::span(logits).first(10), std::ssize(tokens)));
      }
    });
    return {tokens.begin() + static_cast<std::ptrdiff_t>(before), tokens.end()};
  }
  std::string text_of(const Ids& ids) const { return tokenizer().decode(ids); }
  Tokenizer tokenizer() const { return Tokenizer::read(folder_.path()); }

  const testing::TempFolder folder_;
};

// Before its weights are read, which would end the process without a word.
TEST_F(Generate, AModelThatTheMachineCannotHoldIsRefused) {
  json config = testing::parse_json(folder_.read("config.json"));
  config["hidden_size"] = 1 << 12;
  config["vocab_size"] = 16'000'000;
  folder_.write("config.json", config.dump());
  const Outcome outcome = run({"--prompt=abc"});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_TRUE(has(outcome.err,
                  {"error: [memory] expected 97", " GiB of memory for the model on 1 rank, got ",
                   " that are free: ", "try a smaller model\n"}))
      << outcome.err;
}

TEST_F(Generate, PrintsWhatFollowsAPrompt) {
  const Ids want = expected({6, 8}, 20);
  const Outcome outcome = run({"--prompt=abc ab", "--tokens=20"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, text_of(want) + "\n");
  EXPECT_EQ(outcome.err, "");
  const json record = records({"--prompt", "abc ab", "--tokens=20"}).at(0);
  EXPECT_EQ(
      record,
      json({{"prompt", "abc ab"}, {"text", text_of(want)}, {"tokens", want}, {"end", "tokens"}}));
}

TEST_F(Generate, TextsAreTheSameOnAnyRanks) {
  folder_.write("prompts.txt", "abc ab\na\nd c b a\ncd\nabab\n");
  const std::vector<Ids> prompts = {{6, 8}, {0}, {3, 4, 2, 4, 1, 4, 0}, {7}, {5, 5}};
  const Sampling sampling{.temperature = 1.5, .top_k = 9, .top_p = 0.95, .seed = 11};
  for (const char* ranks : {"1", "2", "3", "8"}) {
    SCOPED_TRACE(ranks);
    const std::vector<std::string> common = {"--prompts=prompts.txt", "--tokens=12",
                                             std::string("--ranks=") + ranks};
    std::vector<std::string> drawing = common;
    for (const char* flag : {"--temperature=1.5", "--top_k=9", "--top_p=0.95", "--seed=11"})
      drawing.emplace_back(flag);
    const std::vector<json> greedy = records(common), drawn = records(drawing);
    ASSERT_EQ(greedy.size(), prompts.size());
    ASSERT_EQ(drawn.size(), prompts.size());
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      EXPECT_EQ(greedy[i].at("tokens"), json(expected(prompts[i], 12))) << i;
      EXPECT_EQ(drawn[i].at("tokens"), json(expected(prompts[i], 12, sampling, i))) << i;
    }
  }
}

// Of any lengths, which end at any time, and of which others take the place.
TEST_F(Generate, TextsThatAreMadeTogetherAreThoseOfEachAlone) {
  folder_.write("prompts.txt", "abc ab\na\nd c b a\ncd\nabab\nb b b b b b b\n");
  const std::vector<Ids> prompts = {{6, 8}, {0}, {3, 4, 2, 4, 1, 4, 0}, {7}, {5, 5}};
  const std::int32_t eos = expected(prompts[2], 6).back();
  folder_.write("generation_config.json", json({{"eos_token_id", eos}}).dump());
  std::vector<json> alone;
  for (const char* batch : {"1", "2", "3", "6", "100"}) {
    SCOPED_TRACE(batch);
    const std::vector<json> texts =
        records({"--prompts=prompts.txt", "--tokens=31", std::string("--batch=") + batch});
    ASSERT_EQ(texts.size(), 6u);
    if (alone.empty()) alone = texts;
    EXPECT_EQ(texts, alone);
  }
  std::set<std::size_t> lengths;
  for (const json& text : alone) lengths.insert(text.at("tokens").size());
  EXPECT_GE(lengths.size(), 2u) << "they end at other times";
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    Ids want = expected(prompts[i], std::min<std::int64_t>(31, 33 - std::ssize(prompts[i])));
    const auto end = std::ranges::find(want, eos);
    if (end != want.end()) want.erase(end + 1, want.end());
    EXPECT_EQ(alone[i].at("tokens"), json(want)) << i;
  }
}

// What a training with that precision says, here with keys and values in bf16 as well.
TEST_F(Generate, ComputesInBf16) {
  const std::vector<std::string> f32 = {"--prompt=abc ab", "--prompt=d", "--tokens=20",
                                        "--batch=1"};
  std::vector<std::string> bf16 = f32;
  bf16.emplace_back("--precision.param=bf16");
  const std::vector<json> texts = records(bf16);
  EXPECT_EQ(texts.at(0).at("tokens"), json(expected({6, 8}, 20, {}, 0, engine::DType::kBF16)));
  EXPECT_NE(texts, records(f32));
  std::vector<std::string> on_ranks = bf16;
  on_ranks.emplace_back("--ranks=2");
  EXPECT_EQ(records(on_ranks), texts);
}

// With decoders such as Llama 2's, which leave out the space at the head of a text.
TEST_F(Generate, TextsKeepTheSpaceThatTheyBeginWith) {
  json file = testing::small_tokenizer();
  file["decoder"] = testing::parse_json(R"({"type": "Sequence", "decoders": [
      {"type": "Replace", "pattern": {"String": "\u0120"}, "content": " "}, {"type": "Fuse"},
      {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})");
  folder_.write("tokenizer.json", file.dump());
  int num_with_space = 0;
  for (const char* prompt : {"a", "b", "c", "d", "ab", "abc", "cd", "a b", "dd", "bb"}) {
    Ids ids = tokenizer().encode(prompt);
    const Ids more = expected(ids, 4);
    ids.insert(ids.end(), more.begin(), more.end());
    const std::string whole = text_of(ids);
    const Outcome outcome = run({std::string("--prompt=") + prompt, "--tokens=4"});
    EXPECT_EQ(prompt + outcome.out, whole + "\n");
    if (outcome.out.starts_with(" ")) ++num_with_space;
  }
  EXPECT_GE(num_with_space, 1);
}

TEST_F(Generate, SeveralTextsAreToldApart) {
  const Outcome outcome = run({"--prompt=a", "--prompt=cd", "--tokens=3", "--ranks=2"});
  EXPECT_EQ(outcome.out, "==> 1 <==\n" + text_of(expected({0}, 3)) + "\n\n==> 2 <==\n" +
                             text_of(expected({7}, 3)) + "\n");
}

TEST_F(Generate, TextsEndWhereTheModelsFilesSay) {
  Ids want = expected({6, 8}, 20);
  const std::int32_t eos = want.at(3);
  want.resize(static_cast<std::size_t>(std::ranges::find(want, eos) - want.begin()) + 1);
  folder_.write("generation_config.json", json({{"eos_token_id", eos}}).dump());
  const json record = records({"--prompt=abc ab", "--tokens=20"}).at(0);
  EXPECT_EQ(record.at("tokens"), json(want));
  EXPECT_EQ(record.at("end"), "eos");
  EXPECT_EQ(record.at("text"), text_of({want.begin(), want.end() - 1}));
}

TEST_F(Generate, TextsEndWithTheModelsPositions) {
  const Outcome outcome = run({"--prompt=a", "--prompt=abc ab", "--tokens=32", "--json"});
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_TRUE(has(outcome.err, {"warning: prompt 2 has 31 of 32 tokens, as the model has 32 "
                                "positions, of which the prompt takes 2\n"}));
  EXPECT_EQ(outcome.err.find("prompt 1"), std::string::npos);
  const std::string last = outcome.out.substr(outcome.out.find('\n') + 1);
  EXPECT_EQ(testing::parse_json(last).at("end"), "positions");
  std::string longest;
  for (int i = 0; i < 32; ++i) longest += "b";
  EXPECT_EQ(records({"--prompt=" + longest}).at(0).at("tokens").size(), 1u);
  EXPECT_TRUE(has(run({"--prompt=" + longest + "b"}).err,
                  {"a prompt of 1 to 32 tokens, the positions of the model, got 33 (prompt 1: b"}));
}

// Added to the weights as a merge into a folder adds them.
TEST_F(Generate, AdaptersAreAddedToTheModel) {
  const ModelConfig base = read_model_config(folder_.path());
  ModelConfig config = base;
  config.lora = {.rank = 2, .targets = {"q_proj", "v_proj", "down_proj"}};
  const std::string adapter = folder_ / "adapter", whole = folder_ / "whole";
  write_adapters(*config.make(), config.lora, adapter, folder_.path(),
                 [](const engine::Parameter&, std::span<float> values) {
                   for (std::size_t i = 0; i < values.size(); ++i)
                     values[i] = 0.5f * std::sin(static_cast<float>(i));
                 });
  merge_model(*base.make(), folder_.path(), LoraDelta(adapter, base), whole, {}, [](auto) {});
  std::filesystem::copy_file(folder_ / "tokenizer.json", whole + "/tokenizer.json");
  const std::vector<std::string> asked = {"--prompt", "abc ab", "--tokens=20"};
  std::vector<std::string> with_adapter = asked;
  with_adapter.emplace_back("--adapter=adapter");
  const json tokens = records(with_adapter).at(0).at("tokens");
  const Outcome merged = testing::run_program(
      "tools/generate/generate",
      std::vector<std::string>{"--from=" + whole, "--prompt", "abc ab", "--tokens=20", "--json"});
  EXPECT_EQ(merged.exit_code, 0) << merged.err;
  EXPECT_EQ(testing::parse_json(merged.out).at("tokens"), tokens);
  EXPECT_NE(records(asked).at(0).at("tokens"), tokens);
  const Outcome none = run({"--prompt=a", "--adapter=nowhere"});
  EXPECT_EQ(none.exit_code, 1);
  EXPECT_TRUE(has(none.err, {"expected a folder of PEFT's with adapter_config.json, got none"}));
}

TEST_F(Generate, WhatCannotBeHonouredIsRefused) {
  struct Case {
    std::vector<std::string> arguments;
    const char* what;
  };
  const Case cases[] = {
      {{}, "expected --prompt=TEXT or --prompts=FILE, got neither"},
      {{"--prompt=a", "--prompts=x"}, "got both"},
      {{"--prompt=a", "--prompt="},
       "expected a prompt of 1 to 32 tokens, the positions of the "
       "model, got 0 (prompt 2"},
      {{"--prompts=missing"}, "missing"},
      {{"--prompt=a", "--top_k=5"}, "expected no --top_k with a temperature of 0"},
      {{"--prompt=a", "--top_p=0.5"}, "expected no --top_p with a temperature of 0"},
      {{"--prompt=a", "--seed=5"}, "expected no --seed with a temperature of 0"},
      {{"--prompt=a", "--temperature=1", "--top_p=0"}, "top_p"},
      {{"--prompt=a", "--temperature=-1"}, "temperature"},
      {{"--prompt=a", "--ranks=0"}, "ranks"},
      {{"--prompt=a", "--tokens=0"}, "tokens"},
      {{"--prompt=a", "--batch=0"}, "batch"},
      {{"--prompt=a", "--precision.param=f16"}, "precision.param"},
      {{"--prompt"}, "no value (prompt)"},
  };
  for (const Case& c : cases) {
    const Outcome outcome = run(c.arguments);
    EXPECT_EQ(outcome.exit_code, 1) << c.what;
    EXPECT_TRUE(has(outcome.err, {"error: [", c.what}));
    EXPECT_EQ(outcome.out, "");
  }
  EXPECT_TRUE(has(
      testing::run_program("tools/generate/generate", std::vector<std::string>{"--prompt=a"}).err,
      {"expected --from=FOLDER"}));
  const Outcome help = run({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_TRUE(
      has(help.out, {"--from", "--prompt=", "--prompts", "--tokens", "--temperature", "--top_k",
                     "--top_p", "--seed", "--ranks", "--batch", "--precision.param", "--json"}));
}

TEST_F(Generate, AFolderWithoutATokenizerOrOfAnotherModelIsRefused) {
  nlohmann::json large = testing::small_tokenizer();
  large["added_tokens"][0]["id"] = 9;
  for (int id = 10; id < 40; ++id) {
    nlohmann::json token = large["added_tokens"][0];
    token["id"] = id;
    token["content"] = "<" + std::to_string(id) + ">";
    large["added_tokens"].push_back(token);
  }
  folder_.write("tokenizer.json", large.dump());
  EXPECT_EQ(run({"--prompt=a<36>", "--tokens=1"}).exit_code, 0);
  EXPECT_TRUE(
      has(run({"--prompt=a<37>"}).err, {"a tokenizer of the model's 37 tokens, got token 37 "
                                        "(prompt 1: a<37>)"}));
  std::filesystem::remove(folder_ / "tokenizer.json");
  EXPECT_TRUE(has(run({"--prompt=a"}).err, {"error: [tokenizer] expected tokenizer.json"}));
  std::filesystem::remove(folder_ / "config.json");
  EXPECT_EQ(run({"--prompt=a"}).exit_code, 1);
}

}  // namespace
}  // namespace tessera::tools
