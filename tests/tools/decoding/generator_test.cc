// What a model is asked for a text, and where a text ends.
#include "tools/decoding/generator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
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
    const auto ids = tokens.span<std::int32_t>();
    whole.emplace_back(ids.begin(), ids.end());
    return after(tape, {ids.back()});
  }
  Tensor next_token_logits(Tape& tape, const Tensor& tokens, KeyValueCache& cache) override {
    cache.begin(tape, tokens.dim(1));
    cache.end();
    const auto ids = tokens.span<std::int32_t>();
    read.emplace_back(ids.begin(), ids.end());
    return after(tape, tokens.dim(0) == 1 ? Ids{ids.back()} : read.back());
  }

  std::vector<Ids> read, whole;  // with and without what is kept

 private:
  static Tensor after(const Tape& tape, const Ids& ids) {
    std::vector<float> logits(ids.size() * kVocab, 0);
    for (std::size_t i = 0; i < ids.size(); ++i)
      logits[i * kVocab + static_cast<std::size_t>((ids[i] + 1) % kVocab)] = 1;
    return Tensor::from<float>(tape.memory(), {std::ssize(ids), kVocab}, logits);
  }
};

class Generator : public ::testing::Test {
 protected:
  // Of each next token the likeliest.
  static std::int32_t next(std::span<const float> logits, std::int64_t) {
    return static_cast<std::int32_t>(std::ranges::max_element(logits) - logits.begin());
  }
  Continuation go_on(const Ids& prompt, const GenerateOptions& options, std::size_t stop_at = 100) {
    used_.clear();
    model_.read.clear();
    model_.whole.clear();
    const TextRequest request{.prompt = prompt, .next = next, .use = [&](std::int32_t token) {
                                used_.push_back(token);
                                return used_.size() < stop_at;
                              }};
    Continuation all;
    generate(tape_, model_, std::span(&request, 1), options,
             [&](std::size_t text, Continuation made) {
               EXPECT_EQ(text, 0u);
               all = std::move(made);
             });
    return all;
  }
  /// What follows each, and in which order they end.
  std::vector<Ids> go_on_all(const std::vector<Ids>& prompts, const GenerateOptions& options) {
    model_.read.clear();
    ended_.clear();
    std::vector<TextRequest> requests;
    for (const Ids& prompt : prompts) requests.push_back({.prompt = prompt, .next = next});
    std::vector<Ids> all(prompts.size());
    generate(tape_, model_, requests, options, [&](std::size_t text, Continuation made) {
      all[text] = std::move(made.tokens);
      ended_.push_back(text);
    });
    return all;
  }

  const engine::Memory memory_;
  Tape tape_{memory_, engine::Stream::inline_cpu("compute")};
  Counting model_;
  Ids used_;
  std::vector<std::size_t> ended_;
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

TEST_F(Generator, ReadsATokenOfEachTextInAForward) {
  const std::vector<Ids> prompts = {{3, 1, 2}, {5}, {0, 1}},
                         want = {{3, 4, 5}, {6, 7, 0}, {2, 3, 4}};
  GenerateOptions options{.num_tokens = 3, .vocab = 8, .batch = 2};
  EXPECT_EQ(go_on_all(prompts, options), want);
  EXPECT_EQ(model_.read, (std::vector<Ids>{{3, 1, 2}, {5}, {3, 6}, {4, 7}, {0, 1}, {2}, {3}}));
  options.batch = 5;
  EXPECT_EQ(go_on_all(prompts, options), want);
  EXPECT_EQ(model_.read, (std::vector<Ids>{{3, 1, 2}, {5}, {0, 1}, {3, 6, 2}, {4, 7, 3}}));
  options.batch = 1;
  EXPECT_EQ(go_on_all(prompts, options), want);
  EXPECT_EQ(model_.read, (std::vector<Ids>{{3, 1, 2}, {3}, {4}, {5}, {6}, {7}, {0, 1}, {2}, {3}}));
  options.keeps = false;
  EXPECT_EQ(go_on_all(prompts, options), want);
  EXPECT_EQ(model_.read, std::vector<Ids>());
}

TEST_F(Generator, ATextThatEndsMakesPlaceForTheNext) {
  const GenerateOptions options{.num_tokens = 3, .vocab = 8, .eos = {7}, .batch = 2};
  EXPECT_EQ(go_on_all({{3}, {6}, {1}}, options), (std::vector<Ids>{{4, 5, 6}, {7}, {2, 3, 4}}));
  EXPECT_EQ(model_.read, (std::vector<Ids>{{3}, {6}, {1}, {4, 2}, {5, 3}}));
  EXPECT_EQ(ended_, (std::vector<std::size_t>{1, 0, 2}));
}

// As long as all tokens have places each is read once; then the last ten are read for each.
TEST_F(Generator, ATextThatSlidesGoesOnAfterTheLastPosition) {
  const GenerateOptions options{.num_tokens = 6, .vocab = 8, .slides = true};
  const Continuation made = go_on({0, 0, 0, 0, 0, 0, 0}, options);
  EXPECT_EQ(made.tokens, (Ids{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(made.end, End::kTokens);
  EXPECT_EQ(model_.read, (std::vector<Ids>{Ids(7, 0), {1}, {2}, {3}}));
  EXPECT_EQ(model_.whole,
            (std::vector<Ids>{{0, 0, 0, 0, 0, 0, 1, 2, 3, 4}, {0, 0, 0, 0, 0, 1, 2, 3, 4, 5}}));
}

TEST_F(Generator, WithoutWhatIsKeptEachTokenIsDrawnFromAll) {
  const Continuation made = go_on({2, 3}, {.num_tokens = 3, .vocab = 8, .keeps = false});
  EXPECT_EQ(made.tokens, (Ids{4, 5, 6}));
  EXPECT_EQ(model_.read, std::vector<Ids>());
  EXPECT_EQ(model_.whole, (std::vector<Ids>{{2, 3}, {2, 3, 4}, {2, 3, 4, 5}}));
}

TEST_F(Generator, EndsAllTextsWhenItIsToldTo) {
  GenerateOptions options{.num_tokens = 9, .vocab = 8, .batch = 2};
  int num_asked = 0;
  options.goes_on = [&] { return ++num_asked != 4; };  // and never again
  EXPECT_EQ(go_on_all({{3}, {6}, {1}}, options), (std::vector<Ids>{{4, 5}, {7, 0}, {}}));
  EXPECT_EQ(num_asked, 4);
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
