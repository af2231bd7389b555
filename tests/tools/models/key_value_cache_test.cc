// Models of every family go on from keys and values that they have kept as they do from all tokens,
// and generate what transformers does: see tests/golden/make_generate_golden.py.
#include "tools/models/key_value_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <nlohmann/json.hpp>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/copy.h"
#include "engine/error.h"
#include "engine/io/file.h"
#include "shard/fsdp.h"
#include "tests/testing/errors.h"
#include "tests/testing/json.h"
#include "tools/models/family.h"
#include "tools/models/language_model.h"
#include "tools/weights/model_files.h"

namespace tessera::tools {
namespace {

using engine::InvalidArgument;
using engine::Tape;
using engine::Tensor;
using testing::error_of;
using testing::has;
using Ids = std::vector<std::int32_t>;

const nlohmann::json& golden() {
  static const nlohmann::json all =
      testing::parse_json(engine::read_text_file("tests/golden/generate.json", 1 << 20));
  return all;
}

std::vector<std::string> names() {
  std::vector<std::string> names;
  for (const auto& [name, ids] : golden().at("models").items()) names.push_back(name);
  return names;
}

class Cached : public ::testing::TestWithParam<std::string> {
 protected:
  using Logits = std::vector<float>;

  /// On each of two ranks, which hold the golden model together.
  static void with_model(const std::function<void(Tape&, LanguageModel&)>& fn) {
    const std::string folder = "tests/golden/" + GetParam();
    const ModelConfig config = read_model_config(folder);
    comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
      const engine::Memory memory({.poison = true});
      Tape tape(memory, engine::Stream::inline_cpu("compute"));
      const auto model = config.make();
      shard::Fsdp fsdp(world, memory, tape.stream(), model->blocks(), model->root(), {});
      load_model(fsdp, *model, folder);
      fsdp.keep_gathered([&] { fn(tape, *model); });
    });
  }

  static Tensor tensor_of(const Tape& tape, std::span<const std::int32_t> ids) {
    return Tensor::from<std::int32_t>(tape.memory(), {1, std::ssize(ids)}, ids, "tokens");
  }
  static Logits whole(Tape& tape, LanguageModel& model, std::span<const std::int32_t> ids) {
    return engine::to_vector<float>(model.next_token_logits(tape, tensor_of(tape, ids)));
  }
  static Logits after(Tape& tape, LanguageModel& model, std::span<const std::int32_t> ids,
                      KeyValueCache& cache) {
    return engine::to_vector<float>(model.next_token_logits(tape, tensor_of(tape, ids), cache));
  }
  static void expect_near(const Logits& got, const Logits& want) {
    ASSERT_EQ(got.size(), want.size());
    float largest = 1;
    for (const float logit : want) largest = std::max(largest, std::abs(logit));
    for (std::size_t v = 0; v < want.size(); ++v) ASSERT_NEAR(got[v], want[v], 1e-5 * largest) << v;
  }
  /// As many as the model has positions: no two neighbours alike.
  static Ids text(const LanguageModel& model) {
    Ids ids;
    for (std::int32_t i = 0; i < model.max_tokens(); ++i) ids.push_back((i * i + 5 * i + 2) % 37);
    return ids;
  }
};

TEST_P(Cached, LogitsAreThoseOfAllTokens) {
  with_model([](Tape& tape, LanguageModel& model) {
    const Ids ids = text(model);
    for (const std::size_t prompt : {std::size_t{1}, std::size_t{7}, ids.size()}) {
      KeyValueCache cache(std::ssize(ids));
      const auto first = std::span<const std::int32_t>(ids).first(prompt);
      EXPECT_EQ(after(tape, model, first, cache), whole(tape, model, first)) << "equal bits";
      for (std::size_t i = prompt; i < ids.size(); ++i) {
        SCOPED_TRACE(i);
        const auto one = std::span<const std::int32_t>(ids).subspan(i, 1);
        expect_near(after(tape, model, one, cache),
                    whole(tape, model, std::span<const std::int32_t>(ids).first(i + 1)));
      }
      EXPECT_EQ(cache.num_tokens(), std::ssize(ids));
    }
  });
}

TEST_P(Cached, SeveralTokensCanFollow) {
  with_model([](Tape& tape, LanguageModel& model) {
    const Ids ids = text(model);
    const std::span<const std::int32_t> all = ids;
    KeyValueCache cache(std::ssize(ids));
    std::size_t read = 0;
    for (const std::size_t count : {5, 4, 1, 6}) {
      expect_near(after(tape, model, all.subspan(read, count), cache),
                  whole(tape, model, all.first(read + count)));
      read += count;
    }
  });
}

// Whatever they have read before, and with whom.
TEST_P(Cached, TextsThatAreReadTogetherHaveWhatEachHasAlone) {
  with_model([](Tape& tape, LanguageModel& model) {
    const Ids ids = text(model);
    const std::span<const std::int32_t> all = ids;
    constexpr std::size_t kFirst[] = {0, 3, 1}, kCount[] = {4, 7, 1};
    std::vector<KeyValueCache> caches(3, KeyValueCache(16));
    for (std::size_t b = 0; b < 3; ++b)
      after(tape, model, all.subspan(kFirst[b], kCount[b]), caches[b]);
    const auto read = [&](std::size_t step, const std::vector<std::size_t>& texts) {
      SCOPED_TRACE(step);
      Ids tokens;
      std::vector<KeyValueCache*> kept;
      for (const std::size_t b : texts) {
        tokens.push_back(ids.at(kFirst[b] + static_cast<std::size_t>(caches[b].num_tokens())));
        kept.push_back(&caches[b]);
      }
      KeyValueCache batch = KeyValueCache::of_batch(kept);
      const Tensor input =
          Tensor::from<std::int32_t>(tape.memory(), {std::ssize(tokens), 1}, tokens, "tokens");
      const Logits logits = engine::to_vector<float>(model.next_token_logits(tape, input, batch));
      const std::size_t vocab = logits.size() / texts.size();
      for (std::size_t i = 0; i < texts.size(); ++i) {
        const std::size_t b = texts[i];
        const auto so_far = static_cast<std::size_t>(caches[b].num_tokens());
        const auto row = logits.begin() + static_cast<std::ptrdiff_t>(i * vocab);
        expect_near({row, row + static_cast<std::ptrdiff_t>(vocab)},
                    whole(tape, model, all.subspan(kFirst[b], so_far)));
      }
    };
    read(0, {0, 1, 2});
    read(1, {2, 0});
    read(2, {1, 2, 0});
    EXPECT_EQ(caches[0].num_tokens(), 7);
    EXPECT_EQ(caches[1].num_tokens(), 9);
  });
}

TEST_P(Cached, GeneratesWhatTransformersDoes) {
  with_model([](Tape& tape, LanguageModel& model) {
    Ids unread = golden().at("prompt");
    Ids want = golden().at("models").at(GetParam());
    // Of a model with a window no more tokens are read than it has.
    const std::int64_t most = model.max_tokens() - std::ssize(unread) + 1;
    want.resize(static_cast<std::size_t>(std::min(most, std::ssize(want))));
    ASSERT_GE(want.size(), 5u);
    KeyValueCache cache(std::ssize(unread) + std::ssize(want));
    Ids got;
    while (got.size() < want.size()) {
      const Logits logits = after(tape, model, unread, cache);
      got.push_back(static_cast<std::int32_t>(std::ranges::max_element(logits) - logits.begin()));
      unread = {got.back()};
    }
    EXPECT_EQ(got, want);
  });
}

TEST_P(Cached, MoreTokensThanThereIsPlaceForAreRefused) {
  with_model([](Tape& tape, LanguageModel& model) {
    KeyValueCache cache(3);
    after(tape, model, Ids{1, 2}, cache);
    EXPECT_TRUE(
        has(error_of<InvalidArgument>([&] {
              after(tape, model, Ids{3, 4}, cache);
            }),
            {"[key_value_cache] expected at most 3 tokens in all, got 2 more than the 2 that"}));
    after(tape, model, Ids{3}, cache);  // as if nothing had been asked
    EXPECT_EQ(cache.num_tokens(), 3);
  });
  EXPECT_TRUE(has(error_of<InvalidArgument>([] {
                    with_model([](Tape& tape, LanguageModel& model) {
                      KeyValueCache cache(100);
                      after(tape, model, text(model), cache);
                      after(tape, model, Ids{1}, cache);
                    });
                  }),
                  {"expected tokens (B, T) with T of at most 0, got (1, 1)"}));
}

INSTANTIATE_TEST_SUITE_P(Models, Cached, ::testing::ValuesIn(names()), [](const auto& test) {
  std::string name = test.param;
  std::ranges::replace(name, '/', '_');
  return name;
});

TEST(KeyValueCache, OfSeveralTextsHasOneRowOfEach) {
  const engine::Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  EXPECT_TRUE(has(error_of<InvalidArgument>([] { KeyValueCache::of_batch({}); }),
                  {"[key_value_cache] expected a text at least, got none"}));
  KeyValueCache first(4), second(4);
  KeyValueCache batch = KeyValueCache::of_batch({&first, &second});
  batch.begin(tape, 1);
  const Tensor qkv = Tensor::zeros(memory, {3, 1, 12}, engine::DType::kF32);
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] {
                    tape.no_grad([&] { return batch.attention(tape, 0, qkv, {.num_heads = 2}); });
                  }),
                  {"queries, keys and values of 2 texts, got ", "(layer 0)"}));
}

TEST(KeyValueCache, IsOfOneSequenceWhoseTokensSeeThoseBefore) {
  const engine::Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  KeyValueCache cache(4);
  cache.begin(tape, 2);
  const auto attend = [&](const engine::Shape& shape, std::size_t layer, bool causal) {
    const Tensor qkv = Tensor::zeros(memory, shape, engine::DType::kF32);
    return error_of<InvalidArgument>([&] {
      tape.no_grad(
          [&] { return cache.attention(tape, layer, qkv, {.num_heads = 2, .causal = causal}); });
    });
  };
  constexpr const char* kWhat = "queries, keys and values of one sequence and 2 tokens, got ";
  EXPECT_TRUE(has(attend({2, 2, 12}, 0, true), {kWhat}));
  EXPECT_TRUE(has(attend({1, 3, 12}, 0, true), {kWhat}));
  EXPECT_TRUE(has(attend({1, 2, 12}, 1, true), {kWhat, "(layer 1)"}));
  EXPECT_TRUE(has(attend({1, 2, 12}, 0, false), {kWhat}));
}

}  // namespace
}  // namespace tessera::tools
