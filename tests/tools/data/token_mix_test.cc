// Mixes of sources: exact shares, and of each source its own epochs.
#include "tools/data/token_mix.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/memory.h"
#include "engine/tensor.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/testing/marked.h"
#include "tools/data/token_writer.h"

namespace tessera::tools {
namespace {

using engine::InvalidArgument;
using testing::error_of;
using testing::has;
using testing::TempFolder;

using Ids = std::vector<std::int32_t>;
using Weights = std::vector<double>;
constexpr std::int32_t kNo = kMasked;
constexpr std::int64_t kBlock = MixOrder::kBlock, kVocab = 1 << 20;

TEST(MixOrder, EveryBlockHasTheQuotasExactly) {
  const std::pair<Weights, std::vector<std::int64_t>> cases[] = {
      {{0.5, 0.25, 0.25}, {2048, 1024, 1024}},
      {{2, 1, 1}, {2048, 1024, 1024}},
      {{1, 1, 1}, {1366, 1365, 1365}},
      {{0.7, 0.3}, {2867, 1229}},
      {{1, 4095}, {1, 4095}},
      {{7}, {4096}}};
  for (const auto& [weights, quotas] : cases) {
    const MixOrder order(weights, 3);
    EXPECT_EQ(order.quotas(), quotas);
    for (const std::int64_t block : {0, 1, 2, 1'000'000'000}) {
      std::vector<std::int64_t> counts(weights.size());
      for (std::int64_t n = block * kBlock; n < (block + 1) * kBlock; ++n)
        ++counts[order.place(n).source];
      EXPECT_EQ(counts, quotas) << block;
    }
  }
}

TEST(MixOrder, TheSamplesOfASourceComeInTheirOrder) {
  const MixOrder order(Weights{5, 2, 1}, 4);
  std::vector<std::int64_t> next(3);
  for (std::int64_t n = 0; n < 6 * kBlock + 1234; ++n) {
    const MixOrder::Place place = order.place(n);
    ASSERT_EQ(place.sample, next[place.source]++) << n;
  }
}

TEST(MixOrder, OfOneSourceASampleIsItself) {
  const MixOrder order(Weights{0.3}, 5);
  for (const std::int64_t n : {0L, 1L, 4095L, 4096L, 12345L, 1L << 60})
    EXPECT_EQ(order.place(n).sample, n);
}

TEST(MixOrder, SourcesTakeTurnsInAnotherOrderInEachBlockAndForEachSeed) {
  const auto turns = [](std::uint64_t seed, std::int64_t block) {
    const MixOrder order(Weights{1, 1}, seed);
    std::string sources;
    for (std::int64_t n = 0; n < kBlock; ++n)
      sources += order.place(block * kBlock + n).source == 0 ? 'a' : 'b';
    return sources;
  };
  const std::set<std::string> all = {turns(1, 0), turns(1, 1), turns(1, 2), turns(2, 0)};
  EXPECT_EQ(all.size(), 4U);
  EXPECT_EQ(turns(1, 1), turns(1, 1));
  // Shuffled: neither in runs nor one by one.
  const std::string& some = *all.begin();
  int changes = 0;
  for (std::size_t i = 1; i < some.size(); ++i) changes += some[i] != some[i - 1] ? 1 : 0;
  EXPECT_NEAR(changes, 2048, 200);
}

TEST(MixOrder, RefusesWeightsThatGiveNoShare) {
  for (const Weights& weights :
       {Weights{}, Weights{1, 0}, Weights{-1, 2}, Weights{1, NAN}, Weights{1, INFINITY}}) {
    EXPECT_THROW(MixOrder(weights, 0), InvalidArgument);
  }
  EXPECT_TRUE(has(error_of<InvalidArgument>([] {
                    MixOrder(Weights{1, 1e-5}, 0);
                  }),
                  {"[mix]", "at least one sample in 4096", "got 1e-05 of 1.00001"}));
}

/// Token ids from `first` on.
std::string plain(const TempFolder& folder, const std::string& name, std::int32_t first,
                  std::int32_t num) {
  TokenWriter writer(kVocab);
  Ids ids(static_cast<std::size_t>(num));
  std::iota(ids.begin(), ids.end(), first);
  writer.add(ids);
  writer.write(folder / name);
  return folder / name;
}

std::string documents(const TempFolder& folder, const std::string& name,
                      const std::vector<std::pair<Ids, int>>& all) {
  TokenWriter writer(kVocab, /*keeps_documents=*/true);
  for (const auto& [ids, num_not_learned] : all)
    writer.add_document(testing::marked(ids, num_not_learned));
  writer.write(folder / name);
  return folder / name;
}

TokenMix mix(const std::vector<std::string>& paths, const Weights& weights,
             const TokenDatasetOptions& options) {
  std::vector<TokenDataset> sources;
  for (const std::string& path : paths) sources.emplace_back(TokenFile(path), options);
  return {std::move(sources), weights, 7};
}

struct Batch {
  Ids tokens, targets, positions;
};

template <class Data>
Batch batch_of(const Data& data, std::int64_t first, std::int64_t batch) {
  const auto numel = static_cast<std::size_t>(batch * data.seq());
  Batch result{Ids(numel), Ids(numel), Ids(data.packs() ? numel : 0)};
  data.batch(first, batch, result.tokens, result.targets, result.positions);
  return result;
}

TEST(TokenMix, EachSourceGoesThroughEpochsOfItsOwn) {
  const TempFolder folder;
  const TokenMix data =
      mix({plain(folder, "a.bin", 0, 4 * 50 + 1),      // 50 sequences
           plain(folder, "b.bin", 1000, 4 * 30 + 1)},  // 30
          {0.75, 0.25}, {.seq = 4, .vocab = kVocab, .order = SampleOrder::kShuffle, .seed = 9});
  EXPECT_EQ(data.num_sequences(), 80);
  std::map<std::int32_t, int> seen[2];  // first token to times
  int num[2] = {};
  const std::size_t num_sequences[] = {50, 30};
  for (std::int64_t n = 0; n < 1000; ++n) {
    const Batch batch = batch_of(data, n, 1);
    const auto source = static_cast<std::size_t>(batch.tokens[0] >= 1000 ? 1 : 0);
    EXPECT_EQ(data.place(n).source, source);
    EXPECT_EQ(batch.targets[3], batch.tokens[0] + 4);
    ++seen[source][batch.tokens[0]];
    if (++num[source] % int(num_sequences[source]) != 0) continue;
    const int epochs = num[source] / int(num_sequences[source]);
    EXPECT_EQ(seen[source].size(), num_sequences[source]);
    for (const auto& [token, times] : seen[source]) EXPECT_EQ(times, epochs) << token;
  }
  EXPECT_GT(num[1], 200);
}

TEST(TokenMix, SamplesDoNotDependOnHowTheyAreDealt) {
  const TempFolder folder;
  const TokenMix data = mix({plain(folder, "a.bin", 0, 101), plain(folder, "b.bin", 1000, 61)},
                            {1, 2}, {.seq = 4, .vocab = kVocab, .order = SampleOrder::kShuffle});
  const Batch all = batch_of(data, 4090, 12);  // from one block into the next
  Ids tokens, targets;
  for (std::int64_t i = 0; i < 4; ++i) {
    const Batch part = batch_of(data, 4090 + 3 * i, 3);
    tokens.insert(tokens.end(), part.tokens.begin(), part.tokens.end());
    targets.insert(targets.end(), part.targets.begin(), part.targets.end());
  }
  EXPECT_EQ(tokens, all.tokens);
  EXPECT_EQ(targets, all.targets);
}

TEST(TokenMix, OfOneSourceIsThatSource) {
  const TempFolder folder;
  const std::string path = plain(folder, "a.bin", 0, 101);
  const TokenDatasetOptions options{
      .seq = 4, .vocab = kVocab, .order = SampleOrder::kShuffle, .seed = 5};
  const TokenMix one = mix({path}, {0.2}, options);
  const TokenDataset alone(TokenFile(path), options);
  EXPECT_EQ(batch_of(one, 20, 70).tokens, batch_of(alone, 20, 70).tokens);
  EXPECT_EQ(one.text(), path);
}

TEST(TokenMix, ValidationIsThePartsOfAllSources) {
  const TempFolder folder;
  const TokenMix data =
      mix({plain(folder, "a.bin", 0, 4 * 10 + 1), plain(folder, "b.bin", 1000, 4 * 5 + 1)}, {9, 1},
          {.seq = 4, .vocab = kVocab, .val_fraction = 0.2});
  ASSERT_EQ(data.num_val_sequences(), 2 + 1);
  Ids tokens(12), targets(12);
  data.val_batch(0, 3, tokens, targets);
  EXPECT_EQ(tokens, (Ids{32, 33, 34, 35, 36, 37, 38, 39, 1016, 1017, 1018, 1019}));
  EXPECT_EQ(targets, (Ids{33, 34, 35, 36, 37, 38, 39, 40, 1017, 1018, 1019, 1020}));
  EXPECT_EQ(data.num_val_targets(1, 2), 8);
  EXPECT_THROW(data.val_batch(1, 3, tokens, targets), InvalidArgument);
}

// Of a file without documents all targets are learned.
TEST(TokenMix, HasDocumentsAndPlainTokens) {
  const TempFolder folder;
  const std::string apart =
      documents(folder, "a.bin", {{{1, 2, 3}, 0}, {{4, 5, 6, 7}, 2}, {{8, 9}, 0}});
  const std::string whole = plain(folder, "b.bin", 1000, 9);
  for (const bool packing : {false, true}) {
    const TokenMix data =
        mix({apart, whole}, {1, 1}, {.seq = 4, .vocab = kVocab, .packing = packing});
    EXPECT_TRUE(data.keeps_documents());
    std::set<Ids> rows;
    for (std::int64_t n = 0; n < 40; ++n) {
      const Batch batch = batch_of(data, n, 1);
      EXPECT_EQ(data.num_targets(n, 1), 4 - std::ranges::count(batch.targets, kNo));
      rows.insert(batch.tokens);
      if (batch.tokens[0] < 1000) continue;
      EXPECT_EQ(std::ranges::count(batch.targets, kNo), 0);
      EXPECT_EQ(batch.positions, packing ? (Ids{0, 1, 2, 3}) : Ids{});
    }
    const std::set<Ids> alone = {{1, 2, 0, 0}, {4, 5, 6, 0}, {8, 0, 0, 0}};
    const std::set<Ids> together = {{1, 2, 8, 0}, {4, 5, 6, 0}};
    std::set<Ids> want = packing ? together : alone;
    want.insert({{1000, 1001, 1002, 1003}, {1004, 1005, 1006, 1007}});
    EXPECT_EQ(rows, want);
    EXPECT_EQ(data.num_targets(0, 40), [&] {
      std::int64_t sum = 0;
      for (std::int64_t n = 0; n < 40; ++n) sum += data.num_targets(n, 1);
      return sum;
    }());
  }
}

TEST(TokenMix, WritesToTheTensorsOfABatch) {
  const TempFolder folder;
  const std::string path =
      documents(folder, "a.bin", {{{1, 2, 3}, 0}, {{4, 5}, 0}, {{6, 7, 8}, 0}});
  const TokenMix data =
      mix({path}, {1}, {.seq = 3, .vocab = kVocab, .val_fraction = 0.3, .packing = true});
  std::vector<engine::Tensor> host;
  for (const char* name : {"tokens", "targets", "positions"})
    host.push_back(engine::Tensor::empty(engine::Memory(), {1, 3}, engine::DType::kI32, name));
  const auto ids = [&](std::size_t i) {
    const auto values = host[i].span<std::int32_t>();
    return Ids(values.begin(), values.end());
  };
  data.batch(0, 1, host);
  EXPECT_EQ(ids(0), (Ids{1, 2, 4}));
  EXPECT_EQ(ids(1), (Ids{2, 3, 5}));
  EXPECT_EQ(ids(2), (Ids{0, 1, 0}));
  data.val_batch(0, 1, host);
  EXPECT_EQ(ids(0), (Ids{6, 7, 0}));
  EXPECT_EQ(ids(1), (Ids{7, 8, kNo}));
  EXPECT_EQ(ids(2), (Ids{0, 1, 0}));
  host.pop_back();
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { data.batch(0, 1, host); }),
                  {"room for 3 positions, got 0"}));
  host.pop_back();
  EXPECT_THROW(data.batch(0, 1, host), InvalidArgument);
}

TEST(TokenMix, IsKnownByItsSourcesAndTheirShares) {
  const std::string a = "9 tokens 0a", b = "8 tokens 0b";
  const auto digest = [](std::vector<std::string> digests, std::vector<std::int64_t> quotas) {
    return digest_of_mix(digests, quotas);
  };
  EXPECT_EQ(digest({a}, {4096}), a);
  EXPECT_EQ(digest({a, b}, {3000, 1096}), "3000 of 9 tokens 0a, 1096 of 8 tokens 0b");
  EXPECT_THROW(digest({a}, {1, 2}), InvalidArgument);
  const TempFolder folder;
  const TokenMix data = mix({plain(folder, "a.bin", 0, 9), plain(folder, "b.bin", 0, 9)},
                            {0.7, 0.3}, {.seq = 4, .vocab = 9});
  EXPECT_EQ(data.text(), "70.0% " + (folder / "a.bin") + ", 30.0% " + (folder / "b.bin"));
}

}  // namespace
}  // namespace tessera::tools
