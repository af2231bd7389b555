// docs/inference.md, line by line: what it shows is this program.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "comm/host_gather.h"
#include "comm/threads.h"
#include "engine/copy.h"
#include "engine/philox.h"
#include "engine/tape.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"
#include "tests/docs/shown.h"
#include "tools/models/gpt.h"
#include "tools/models/key_value_cache.h"

namespace tessera {
namespace {

using engine::Tensor;
using Tokens = std::vector<std::int32_t>;

constexpr std::int64_t kVocab = 12;

struct Rank {
  explicit Rank(comm::ProcessGroup& world, const std::string& strategy = "zero3")
      : fsdp(world, memory, compute, model.blocks(), model.root(),
             {.placement = shard::Placement::preset(strategy)}) {}

  // Of each position the token after it.
  std::vector<Tensor> batch_of(const Tokens& tokens) const {
    const auto numel = std::ssize(tokens) - 1;
    const auto part = [&](std::size_t begin, const char* name) {
      return Tensor::from<std::int32_t>(
          memory, {1, numel},
          std::span<const std::int32_t>(tokens).subspan(begin, static_cast<std::size_t>(numel)),
          name);
    };
    return {part(0, "tokens"), part(1, "targets")};
  }

  engine::Stream compute = engine::Stream::inline_cpu("compute");
  engine::Memory memory;
  engine::Tape tape{memory, compute};
  tools::Gpt model{{.layers = 2, .heads = 2, .dim = 16, .seq = 6, .vocab = kVocab}};
  shard::Fsdp fsdp;
};

// clang-format off
void generate(shard::Fsdp& fsdp, engine::Tape& tape, tools::Gpt& model, Tokens& tokens, std::size_t length) {
  fsdp.keep_gathered([&] {
    while (tokens.size() < length) {
      const std::int64_t context = std::min(std::ssize(tokens), model.max_tokens());
      const auto last = std::span<const std::int32_t>(tokens).last(static_cast<std::size_t>(context));
      const Tensor input = Tensor::from<std::int32_t>(tape.memory(), {1, context}, last, "tokens");
      const auto logits = engine::to_vector<float>(model.next_token_logits(tape, input));
      tokens.push_back(static_cast<std::int32_t>(std::ranges::max_element(logits) - logits.begin()));
    }
  });
}

void generate_cached(shard::Fsdp& fsdp, engine::Tape& tape, tools::Gpt& model, Tokens& tokens, std::size_t length) {
  fsdp.keep_gathered([&] {
    tools::KeyValueCache cache(static_cast<std::int64_t>(length));
    Tokens unread = tokens;
    while (tokens.size() < length) {
      const Tensor input = Tensor::from<std::int32_t>(tape.memory(), {1, std::ssize(unread)}, unread, "tokens");
      const auto logits = engine::to_vector<float>(model.next_token_logits(tape, input, cache));
      unread = {static_cast<std::int32_t>(std::ranges::max_element(logits) - logits.begin())};
      tokens.push_back(unread.back());
    }
  });
}
// clang-format on

TEST(InferencePage, GeneratesAlikeWithAndWithoutACache) {
  comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
    Rank rank(world);
    Tokens whole = {3, 1}, cached = whole;
    generate(rank.fsdp, rank.tape, rank.model, whole, 6);
    generate_cached(rank.fsdp, rank.tape, rank.model, cached, 6);
    EXPECT_EQ(cached, whole);
  });
}

TEST(InferencePage, GeneratesAlikeUnderEveryStrategy) {
  std::vector<Tokens> texts;
  for (const char* strategy : {"ddp", "zero3", "hfsdp"}) {
    comm::run_ranks(4, {}, [&](comm::ProcessGroup& world) {
      Rank rank(world, strategy);
      // Prompts of different lengths.
      Tokens tokens(static_cast<std::size_t>(1 + world.rank()), 3);
      generate(rank.fsdp, rank.tape, rank.model, tokens, 10);
      EXPECT_EQ(tokens.size(), 10u);
      if (world.rank() == 1) texts.push_back(tokens);
    });
  }
  EXPECT_EQ(texts[1], texts[0]);
  EXPECT_EQ(texts[2], texts[0]);
}

struct Batches {
  bool has_next() const { return num_read < all.size(); }
  const std::vector<Tensor>& next() { return all[num_read++]; }

  std::vector<std::vector<Tensor>> all = {};
  std::size_t num_read = 0;
};

TEST(InferencePage, EvaluatesDifferentNumbersOfBatches) {
  comm::run_ranks(4, {}, [](comm::ProcessGroup& world) {
    Rank rank(world);
    const engine::Stream& compute = rank.compute;
    const engine::Memory& memory = rank.memory;
    engine::Tape& tape = rank.tape;
    tools::Gpt& model = rank.model;
    shard::Fsdp& fsdp = rank.fsdp;
    Batches batches;
    const int num_batches = world.rank() == 3 ? 0 : 3 + 2 * world.rank();
    for (int i = 0; i < num_batches; ++i) batches.all.push_back(rank.batch_of({1, 2, 3, i, 5}));
    float sum = 0;
    int count = 0;
    // clang-format off
    fsdp.keep_gathered([&] {
      while (batches.has_next()) {
        const Tensor loss = tape.no_grad([&] { return model.loss(tape, batches.next(), {.training = false}); });
        sum += loss.item();
        ++count;
      }
    });
    const std::vector<float> mine = {sum, static_cast<float>(count)};
    const std::vector<float> all = comm::gather_to_host<float>(world, mine, memory, compute, "losses");  // comm/host_gather.h
    // clang-format on
    ASSERT_EQ(all.size(), 8u);
    for (std::size_t r = 0; r < 4; ++r) {
      EXPECT_EQ(all[2 * r + 1], r == 3 ? 0 : 3 + 2 * static_cast<float>(r));
      EXPECT_NEAR(all[2 * r], all[2 * r + 1] * std::log(float{kVocab}), 1);
    }
  });
}

// Rewards one token: in the end it is drawn nearly always.
TEST(InferencePage, LearnsFromSamples) {
  constexpr std::int32_t kWanted = 7;
  constexpr int kSamples = 8, kSteps = 30;
  std::vector<float> first(2), last(2);
  comm::run_ranks(2, {}, [&](comm::ProcessGroup& world) {
    Rank rank(world);
    engine::Tape& tape = rank.tape;
    shard::Fsdp& fsdp = rank.fsdp;
    tools::Gpt& model = rank.model;
    shard::AdamW optimizer(fsdp, {});
    const engine::RandomStream random{1, static_cast<std::uint64_t>(world.rank())};
    std::uint64_t num_drawn = 0;
    const auto draw = [&](shard::Fsdp& f, engine::Tape& t, tools::Gpt& m, Tokens& tokens,
                          std::size_t length) {
      f.keep_gathered([&] {
        while (tokens.size() < length) {
          const Tensor input =
              Tensor::from<std::int32_t>(t.memory(), {1, std::ssize(tokens)}, tokens, "tokens");
          auto weights = engine::to_vector<float>(m.next_token_logits(t, input));
          for (float& w : weights) w = std::exp(w);
          float pick = static_cast<float>(random.uniform(num_drawn++)) *
                       std::accumulate(weights.begin(), weights.end(), 0.0f);
          std::int32_t token = 0;
          while (token + 1 < kVocab && pick >= weights[static_cast<std::size_t>(token)]) {
            pick -= weights[static_cast<std::size_t>(token++)];
          }
          tokens.push_back(token);
        }
      });
    };
    const auto rank_of = static_cast<std::size_t>(world.rank());
    const auto score = [&](const std::vector<Tokens>& samples) {
      std::vector<float> rewards;
      for (const Tokens& sample : samples) {
        rewards.push_back(static_cast<float>(std::ranges::count(sample, kWanted)));
      }
      const float mean =
          std::accumulate(rewards.begin(), rewards.end(), 0.0f) / static_cast<float>(kSamples);
      if (first[rank_of] == 0) first[rank_of] = mean;
      last[rank_of] = mean;
      for (float& reward : rewards) reward -= mean;
      return rewards;
    };
    const auto batch_of = [&](const Tokens& tokens) { return rank.batch_of(tokens); };
    constexpr int num_steps = kSteps, num_samples = kSamples;
    constexpr std::size_t length = 6;
    constexpr double lr = 0.02;
    const Tokens prompt = {1};
    // clang-format off
    for (int step = 0; step < num_steps; ++step) {
      std::vector<Tokens> samples(num_samples, prompt);
      fsdp.keep_gathered([&] {
        for (Tokens& sample : samples) draw(fsdp, tape, model, sample, length);
      });
      const std::vector<float> advantages = score(samples);
      fsdp.begin_step(num_samples);
      for (std::size_t i = 0; i < num_samples; ++i) {
        if (i > 0) fsdp.next_micro_step();
        const Tensor loss = model.loss(tape, batch_of(samples[i]), {});  // mean of -log p(token)
        tape.backward(loss, /*seed=*/advantages[i]);
      }
      optimizer.step(lr, fsdp.finish_step(), /*max_norm=*/1);
    }
    // clang-format on
  });
  for (std::size_t r = 0; r < 2; ++r) {
    EXPECT_LT(first[r], 2.5f);
    EXPECT_GT(last[r], 4) << "of five tokens";
  }
}

TEST(InferencePage, ShowsWhatIsHere) {
  testing::expect_shown("docs/inference.md", "tests/docs/inference_test.cc", 30);
}

}  // namespace
}  // namespace tessera
