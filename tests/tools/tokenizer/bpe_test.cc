// Merges are made first to last, of the same the leftmost first, and in n log(n).
#include "tools/tokenizer/bpe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::tools {
namespace {

using Ids = std::vector<std::int32_t>;

Ids encode(const Bpe& bpe, std::string_view word) {
  BpeScratch scratch;
  Ids ids, again;
  bpe.encode(word, scratch, ids);
  bpe.encode(word, scratch, again);  // from what it remembers
  EXPECT_EQ(ids, again);
  return ids;
}

// What the definition says, in n^2.
Ids naive(Ids ids, const std::vector<Merge>& merges) {
  for (;;) {
    std::size_t best = merges.size(), at = 0;
    for (std::size_t i = 0; i + 1 < ids.size(); ++i) {
      for (std::size_t m = 0; m < best; ++m) {
        if (merges[m].left != ids[i] || merges[m].right != ids[i + 1]) continue;
        best = m;
        at = i;
      }
    }
    if (best == merges.size()) return ids;
    ids[at] = merges[best].result;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
}

TEST(Bpe, TheFirstMergeIsMadeFirstAndOfTheSameTheLeftmost) {
  const TokenIds vocab = {{"a", 0}, {"b", 1}, {"ab", 2}, {"ba", 3}, {"aa", 4}, {"aba", 5}};
  const std::vector<Merge> merges = {{1, 0, 3}, {0, 0, 4}, {0, 1, 2}, {2, 0, 5}};
  const Bpe bpe(vocab, merges, {});
  EXPECT_EQ(encode(bpe, "aba"), (Ids{0, 3}));
  EXPECT_EQ(encode(bpe, "aaa"), (Ids{4, 0}));
  EXPECT_EQ(encode(bpe, "aab"), (Ids{4, 1}));
  EXPECT_EQ(encode(bpe, ""), (Ids{}));
}

TEST(Bpe, WordsOfEveryLengthAreWhatTheDefinitionSays) {
  std::mt19937 random(5);
  const TokenIds vocab = {{"a", 0}, {"b", 1}, {"c", 2}};
  for (int round = 0; round < 30; ++round) {
    // Tokens 3 and up, each made of two that stand before.
    std::vector<Merge> merges;
    for (std::int32_t result = 3; result < 24; ++result) {
      const auto some = [&] { return static_cast<std::int32_t>(random() % std::min(result, 8)); };
      const Merge merge{some(), some(), result};
      const bool is_known = std::ranges::any_of(
          merges, [&](const Merge& m) { return m.left == merge.left && m.right == merge.right; });
      if (!is_known) merges.push_back(merge);
    }
    const Bpe bpe(vocab, merges, {});
    for (const std::size_t size : {1, 2, 7, 47, 48, 49, 50, 130, 700}) {
      std::string word;
      Ids start;
      for (std::size_t i = 0; i < size; ++i) {
        start.push_back(static_cast<std::int32_t>(random() % 3));
        word += static_cast<char>('a' + start.back());
      }
      EXPECT_EQ(encode(bpe, word), naive(start, merges)) << word;
    }
  }
}

// Without the heap it would run out of its time.
TEST(Bpe, AMegabyteOfOneLetterIsEncoded) {
  TokenIds vocab = {{"a", 0}};
  std::vector<Merge> merges;
  for (std::int32_t i = 0; i < 4; ++i) {
    merges.push_back({i, i, i + 1});
    vocab.emplace(std::string(std::size_t{2} << i, 'a'), i + 1);
  }
  const Bpe bpe(vocab, merges, {});
  Ids expected(62500, 4);
  expected.push_back(0);
  EXPECT_TRUE(encode(bpe, std::string(1000001, 'a')) == expected);
}

TEST(Bpe, AWordThatIsATokenNeedsNoMergesWhereTheyAreIgnored) {
  const TokenIds vocab = {{"a", 0}, {"b", 1}, {"ab", 2}};
  EXPECT_EQ(encode(Bpe(vocab, {}, {}), "ab"), (Ids{0, 1}));
  EXPECT_EQ(encode(Bpe(vocab, {}, {.ignore_merges = true}), "ab"), (Ids{2}));
  EXPECT_EQ(encode(Bpe(vocab, {}, {.ignore_merges = true}), "aba"), (Ids{0, 1, 0}));
  const TokenIds bytes = {{"Ġ", 0}, {"a", 1}, {"Ġa", 2}};
  EXPECT_EQ(encode(Bpe(bytes, {}, {.is_byte_level = true, .ignore_merges = true}), " a"), (Ids{2}));
}

TEST(Bpe, CharactersWithoutATokenAreBytesThenUnknownThenNothing) {
  TokenIds vocab = {{"a", 0}, {"<unk>", 1}, {"<0xC3>", 2}, {"<0xA9>", 3}};
  EXPECT_EQ(encode(Bpe(vocab, {}, {}), "a\u00e9b"), (Ids{0}));
  EXPECT_EQ(encode(Bpe(vocab, {}, {.unknown = 1}), "a\u00e9\u00e8a"), (Ids{0, 1, 1, 0}));
  EXPECT_EQ(encode(Bpe(vocab, {}, {.unknown = 1, .fuse_unknown = true}), "\u00e9ba\u00e9"),
            (Ids{1, 0, 1}));
  const Bpe bytes(vocab, {}, {.byte_fallback = true, .unknown = 1});
  EXPECT_EQ(encode(bytes, "a\u00e9"), (Ids{0, 2, 3}));
  // Of U+00E8 one byte has no token.
  EXPECT_EQ(encode(bytes, "\u00e8a"), (Ids{1, 0}));
  EXPECT_EQ(encode(bytes, "xa"), (Ids{1, 0}));
}

TEST(WordCache, RemembersUntilItIsFull) {
  WordCache cache;
  const auto word_of = [](std::size_t i) { return "word" + std::to_string(i); };
  const auto find = [&](const std::string& word) {
    return cache.find(word, WordCache::hash_of(word));
  };
  const std::size_t most = WordCache::kMaxWords;
  for (std::size_t i = 0; i < most; ++i) {
    const Ids ids(i % 3, static_cast<std::int32_t>(i));
    cache.add(word_of(i), WordCache::hash_of(word_of(i)), ids);
  }
  for (std::size_t i = 0; i < most; ++i) {
    const auto ids = find(word_of(i));
    ASSERT_TRUE(ids.has_value()) << i;
    ASSERT_TRUE(std::ranges::equal(*ids, Ids(i % 3, static_cast<std::int32_t>(i)))) << i;
  }
  EXPECT_FALSE(find("other").has_value());
  cache.add("other", WordCache::hash_of("other"), Ids{1});
  EXPECT_TRUE(find("other").has_value());
  EXPECT_FALSE(find(word_of(0)).has_value());
}

}  // namespace
}  // namespace tessera::tools
