// What a model is asked for a text, and where a text ends.
#include "tools/generate/generator.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/tape.h"
#include "tests/testing/errors.h"
#include "tools/models/key_value_cache.h"

namespace tessera::tools {
namespace {

using engine::InvalidArgument;
using engine::Tape;
using engine::Tensor;
using testing::error_of;
using testing::has;
using Ids = std::vector<std::int32_t>;

// After token t comes t + 1, and after the last of its vocabulary the first. It has ten positions.
class Counting : public LanguageModel {
 public:
  static constexpr std::int64_t kVocab = 8;

  std::vector<engine::Block*> blocks() override { return {}; }
  Tensor loss(Tape&, const std::vector<Tensor>&, const Pass&) override { return {}; }
  std::int64_t max_tokens() const override { return 10; }
  double train_flops(std::int64_t) const override { return 0; }
  ModelLayout layout() const override { return {}; }
  std::string config_text() const override { return ""; }
  Tensor next_token_logits(Tape& tape, const Tensor& tokens) override {
    std::vector<float> logits(kVocab, 0);
    logits[static_cast<std::size_t>((tokens.span<std::int32_t>().back() + 1) % kVocab)] = 1;
    return Tensor::from<float>(tape.memory(), {kVocab}, logits);
  }
  Tensor next_token_logits(Tape& tape, const Tensor& tokens, KeyValueCache& cache) override {
    cache.begin(tape, tokens.numel());
    cache.end();
    const auto ids = tokens.span<std::int32_t>();
    read.emplace_back(ids.begin(), ids.end());
    return next_token_logits(tape, tokens);
  }

  std::vector<Ids> read;
};

class Generator : public ::testing::Test {
 protected:
  Continuation go_on(const Ids& prompt, const GenerateOptions& options, std::size_t stop_at = 100) {
    used_.clear();
    model_.read.clear();
    return generate(tape_, model_, prompt, 0, options, [&](std::int32_t token) {
      used_.push_back(token);
      return used_.size() < stop_at;
    });
  }

  const engine::Memory memory_;
  Tape tape_{memory_, engine::Stream::inline_cpu("compute")};
  Counting model_;
  Ids used_;
};

TEST_F(Generator, ReadsEachTokenOnceButTheLast) {
  const Continuation made = go_on({3, 1, 2}, {.num_tokens = 4, .vocab = 8});
  EXPECT_EQ(made.tokens, (Ids{3, 4, 5, 6}));
  EXPECT_EQ(made.end, End::kTokens);
  EXPECT_EQ(used_, made.tokens);
  EXPECT_EQ(model_.read, (std::vector<Ids>{{3, 1, 2}, {3}, {4}, {5}}));
}

TEST_F(Generator, EndsAtATokenThatEndsATextAndDoesNotShowIt) {
  const Continuation made = go_on({1}, {.num_tokens = 9, .vocab = 8, .eos = {0, 5}});
  EXPECT_EQ(made.tokens, (Ids{2, 3, 4, 5}));
  EXPECT_EQ(made.end, End::kEos);
  EXPECT_EQ(used_, (Ids{2, 3, 4}));
  // As the last that is asked for.
  EXPECT_EQ(go_on({1}, {.num_tokens = 4, .vocab = 8, .eos = {5}}).end, End::kEos);
  EXPECT_EQ(go_on({1}, {.num_tokens = 3, .vocab = 8, .eos = {5}}).end, End::kTokens);
}

TEST_F(Generator, EndsWhereTheModelHasNoMorePositions) {
  const Ids prompt(7, 0);
  const Continuation made = go_on(prompt, {.num_tokens = 9, .vocab = 8});
  EXPECT_EQ(made.tokens, (Ids{1, 2, 3, 4}));
  EXPECT_EQ(made.end, End::kPositions);
  std::size_t num_read = 0;
  for (const Ids& ids : model_.read) num_read += ids.size();
  EXPECT_EQ(num_read, 10u);
  EXPECT_EQ(go_on(prompt, {.num_tokens = 4, .vocab = 8}).end, End::kTokens);
  EXPECT_EQ(go_on(Ids(10, 0), {.num_tokens = 2, .vocab = 8}).tokens, Ids{1});
  EXPECT_EQ(go_on(prompt, {.num_tokens = 9, .vocab = 8, .eos = {4}}).end, End::kEos);
}

TEST_F(Generator, DrawsFromTheTokenizersTokensAlone) {
  EXPECT_EQ(go_on({3}, {.num_tokens = 3, .vocab = 6}).tokens, (Ids{4, 5, 0}));
}

TEST_F(Generator, StopsWhenItsUserDoes) {
  EXPECT_EQ(go_on({0}, {.num_tokens = 9, .vocab = 8}, 2).tokens, (Ids{1, 2}));
}

TEST_F(Generator, RefusesPromptsThatTheModelCannotRead) {
  for (const std::size_t length : {0, 11}) {
    EXPECT_TRUE(has(
        error_of<InvalidArgument>([&] { go_on(Ids(length, 0), {.num_tokens = 1, .vocab = 8}); }),
        {"[generate] expected a prompt of 1 to 10 tokens, got " + std::to_string(length)}));
  }
}

}  // namespace
}  // namespace tessera::tools
