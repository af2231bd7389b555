// Documents that share a sequence: where they are put, and that each is read as it was alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/testing/marked.h"
#include "tools/data/first_fit.h"
#include "tools/data/token_dataset.h"
#include "tools/data/token_writer.h"

namespace tessera::tools {
namespace {

using engine::InvalidArgument;
using testing::error_of;
using testing::has;
using testing::TempFolder;

using Ids = std::vector<std::int32_t>;
constexpr std::int32_t kNo = kMasked;
constexpr std::int64_t kVocab = 1 << 20;

std::vector<std::int64_t> first_fit_by_search(const Ids& sizes, std::int64_t capacity) {
  std::vector<std::int64_t> room, bins;
  for (const std::int32_t size : sizes) {
    std::size_t bin = 0;
    while (bin < room.size() && room[bin] < size) ++bin;
    if (bin == room.size()) room.push_back(capacity);
    room[bin] -= size;
    bins.push_back(static_cast<std::int64_t>(bin));
  }
  return bins;
}

TEST(FirstFit, TakesTheFirstBinWithRoom) {
  EXPECT_EQ(first_fit(Ids{5, 6, 3, 2, 1, 8, 2, 1}, 8),
            (std::vector<std::int64_t>{0, 1, 0, 1, 2, 3, 2, 2}));
  EXPECT_EQ(first_fit(Ids{}, 8), (std::vector<std::int64_t>{}));
  EXPECT_EQ(first_fit(Ids{7}, 7), (std::vector<std::int64_t>{0}));
  std::mt19937 random(1);
  for (int num = 0; num < 200; ++num) {
    const int capacity = 1 + static_cast<int>(random() % 40);
    Ids sizes(static_cast<std::size_t>(num));
    for (auto& size : sizes) size = 1 + static_cast<int>(random() % std::uint32_t(capacity));
    EXPECT_EQ(first_fit(sizes, capacity), first_fit_by_search(sizes, capacity)) << num;
  }
}

TEST(FirstFit, OfMillionsTakesAMoment) {
  std::mt19937 random(2);
  Ids sizes(2'000'000);
  std::int64_t sum = 0;
  for (auto& size : sizes) sum += size = 1 + static_cast<int>(random() % 1500);
  const std::vector<std::int64_t> bins = first_fit(sizes, 2048);
  EXPECT_LT(*std::ranges::max_element(bins) + 1, sum / 2048 * 102 / 100);  // a search takes hours
}

TEST(FirstFit, RefusesSizesThatNoBinHolds) {
  for (const std::int32_t size : {0, -1, 9}) {
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] {
                      first_fit(Ids{1, size}, 8);
                    }),
                    {"[first_fit]", "[1, 8]", "got " + std::to_string(size)}));
  }
  EXPECT_THROW(first_fit(Ids{}, 0), InvalidArgument);
}

struct Batch {
  Ids tokens, targets, positions;
};

enum class Part { kTrain, kVal };

Batch batch_of(const TokenDataset& data, Part part, std::int64_t first, std::int64_t batch) {
  const auto numel = static_cast<std::size_t>(batch * data.seq());
  Batch result{Ids(numel), Ids(numel), Ids(data.packs() ? numel : 0)};
  if (part == Part::kTrain)
    data.batch(first, batch, result.tokens, result.targets, result.positions);
  else
    data.val_batch(first, batch, result.tokens, result.targets, result.positions);
  return result;
}

/// A file of documents: so many ids each, of which the first few are not learned.
std::string write(const TempFolder& folder, const std::vector<std::pair<Ids, int>>& documents) {
  TokenWriter writer(kVocab, /*keeps_documents=*/true);
  for (const auto& [ids, num_not_learned] : documents)
    writer.add_document(testing::marked(ids, num_not_learned));
  writer.write(folder / "a.bin");
  return folder / "a.bin";
}

TEST(Packing, PutsDocumentsTogetherInTheirOrder) {
  const TempFolder folder;
  const std::string path = write(folder, {{{1, 2, 3, 4, 5}, 0},
                                          {{11, 12, 13, 14, 15, 16}, 2},
                                          {{21, 22}, 0},
                                          {{31, 32}, 2},
                                          {{41, 42, 43}, 1},
                                          {{51, 52, 53, 54, 55, 56, 57, 58, 59, 60}, 0}});
  const TokenDataset data(TokenFile(path), {.seq = 7, .vocab = kVocab, .packing = true});
  ASSERT_EQ(data.num_sequences(), 3);
  const Batch batch = batch_of(data, Part::kTrain, 0, 3);
  EXPECT_EQ(batch.tokens, (Ids{1,  2,  3,  4,  21, 41, 42,  //
                               11, 12, 13, 14, 15, 58, 59,  //
                               51, 52, 53, 54, 55, 56, 57}));
  EXPECT_EQ(batch.targets, (Ids{2,   3,  4,  5,  22, 42, 43,  //
                                kNo, 13, 14, 15, 16, 59, 60,  //
                                52,  53, 54, 55, 56, 57, 58}));
  EXPECT_EQ(batch.positions, (Ids{0, 1, 2, 3, 0, 0, 1,  //
                                  0, 1, 2, 3, 4, 0, 1,  //
                                  0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(data.cut().num_pieces, 6);
  EXPECT_EQ(data.cut().num_tokens, 21);
  EXPECT_EQ(data.cut().num_targets, 20);
  EXPECT_EQ(data.num_targets(1, 3), 6 + 7 + 7);  // into the next epoch
  // 16 + 25 + 1 + 4 + 49 + 4 pairs of 21 tokens; of rows that are computed whole all.
  EXPECT_EQ(data.mean_length(), 5);
  EXPECT_EQ(TokenDataset(TokenFile(path), {.seq = 7, .vocab = kVocab}).mean_length(), 7);
}

TEST(Packing, PaddingIsADocumentOfItsOwn) {
  const TempFolder folder;
  const std::string path = write(folder, {{{1, 2, 3}, 0}, {{4, 5}, 0}});
  const TokenDataset data(TokenFile(path), {.seq = 6, .vocab = kVocab, .packing = true});
  ASSERT_EQ(data.num_sequences(), 1);
  const Batch batch = batch_of(data, Part::kTrain, 0, 1);
  EXPECT_EQ(batch.tokens, (Ids{1, 2, 4, 0, 0, 0}));
  EXPECT_EQ(batch.targets, (Ids{2, 3, 5, kNo, kNo, kNo}));
  EXPECT_EQ(batch.positions, (Ids{0, 1, 0, 0, 1, 2}));
}

/// Documents of ids that count on, over all of them, so that each target stands in the file once.
std::vector<std::pair<Ids, int>> counting_documents(int num, int longest, std::mt19937& random) {
  std::vector<std::pair<Ids, int>> documents;
  std::int32_t next = 1;
  for (int i = 0; i < num; ++i) {
    Ids ids(1 + random() % static_cast<unsigned>(longest));
    for (auto& id : ids) id = next++;
    const int num_not_learned = static_cast<int>(random() % (ids.size() + 1));
    documents.emplace_back(ids, i % 3 == 0 ? num_not_learned : 0);
  }
  return documents;
}

/// The targets of all sequences, each with how far into its part of a document it stands, as
/// batches of one say; and they are promised to follow their tokens.
std::map<std::int32_t, int> targets_of(const TokenDataset& data, Part part, std::int64_t first) {
  std::map<std::int32_t, int> found;
  const std::int64_t num = part == Part::kTrain ? data.num_sequences() : data.num_val_sequences();
  for (std::int64_t i = first; i < first + num; ++i) {
    const Batch batch = batch_of(data, part, i, 1);
    std::int64_t num_targets = 0;
    std::int32_t position = 0;
    for (std::size_t t = 0; t < batch.tokens.size(); ++t) {
      const std::int32_t token = batch.tokens[t], target = batch.targets[t];
      const bool follows = t > 0 && token == batch.tokens[t - 1] + (token == 0 ? 0 : 1);
      // Where one document ends in the file the next begins, in which ids count on.
      if (data.packs()) {
        position = batch.positions[t];
        EXPECT_TRUE(position == 0 || (follows && position == batch.positions[t - 1] + 1));
      } else {
        position = static_cast<std::int32_t>(t);
      }
      if (target == kNo) continue;
      ++num_targets;
      EXPECT_EQ(target, token + 1);
      EXPECT_TRUE(found.emplace(target, position).second) << target << " is learned twice";
    }
    EXPECT_EQ(part == Part::kTrain ? data.num_targets(i, 1) : data.num_val_targets(i, 1),
              num_targets);
  }
  return found;
}

TEST(Packing, EveryTargetIsLearnedOnceAnEpochAtThePositionThatItHasAlone) {
  std::mt19937 random(3);
  for (const auto& [num, longest, seq] :
       {std::array{300, 20, 16}, {300, 20, 64}, {40, 100, 16}, {500, 4, 128}, {9, 9, 1}}) {
    SCOPED_TRACE(::testing::Message() << num << " documents of up to " << longest << ", " << seq);
    const TempFolder folder;
    const std::string path = write(folder, counting_documents(num, longest, random));
    TokenDatasetOptions options{.seq = seq,
                                .vocab = kVocab,
                                .val_fraction = 0.2,
                                .order = SampleOrder::kShuffle,
                                .seed = 5};
    const TokenDataset alone(TokenFile(path), options);
    options.packing = true;
    const TokenDataset packed(TokenFile(path), options);
    EXPECT_LE(packed.num_sequences(), alone.num_sequences());
    EXPECT_EQ(packed.cut().num_targets, alone.cut().num_targets);
    EXPECT_EQ(packed.cut().num_tokens, alone.cut().num_tokens);
    const std::map<std::int32_t, int> want = targets_of(alone, Part::kTrain, 0);
    EXPECT_EQ(static_cast<std::int64_t>(want.size()), alone.cut().num_targets);
    for (std::int64_t epoch = 0; epoch < 2; ++epoch)
      EXPECT_EQ(targets_of(packed, Part::kTrain, epoch * packed.num_sequences()), want);
    EXPECT_EQ(targets_of(packed, Part::kVal, 0), targets_of(alone, Part::kVal, 0));
  }
}

TEST(Packing, ShufflesPacksAndDoesNotPackByTheSeed) {
  std::mt19937 random(4);
  const TempFolder folder;
  const std::string path = write(folder, counting_documents(400, 20, random));
  const auto rows = [&](SampleOrder order, std::uint64_t seed) {
    const TokenDataset data(
        TokenFile(path),
        {.seq = 32, .vocab = kVocab, .order = order, .seed = seed, .packing = true});
    std::vector<Ids> all;
    for (std::int64_t i = 0; i < data.num_sequences(); ++i)
      all.push_back(batch_of(data, Part::kTrain, i, 1).tokens);
    return all;
  };
  const std::vector<Ids> in_order = rows(SampleOrder::kSequential, 1);
  std::vector<Ids> one = rows(SampleOrder::kShuffle, 1), two = rows(SampleOrder::kShuffle, 2);
  EXPECT_NE(one, in_order);
  EXPECT_NE(one, two);
  const std::multiset<Ids> packs(in_order.begin(), in_order.end());
  EXPECT_EQ(std::multiset<Ids>(one.begin(), one.end()), packs);
  EXPECT_EQ(std::multiset<Ids>(two.begin(), two.end()), packs);
}

TEST(Packing, OfAFileWithoutDocumentsASequenceIsOne) {
  const TempFolder folder;
  const TokenDataset data(TokenFile(folder.write("a.txt", "abcdefghijk")),
                          {.seq = 3, .packing = true});
  const Batch batch = batch_of(data, Part::kTrain, 0, 2);
  EXPECT_EQ(batch.tokens, (Ids{97, 98, 99, 100, 101, 102}));
  EXPECT_EQ(batch.targets, (Ids{98, 99, 100, 101, 102, 103}));
  EXPECT_EQ(batch.positions, (Ids{0, 1, 2, 0, 1, 2}));
}

TEST(Packing, NeedsRoomForPositions) {
  const TempFolder folder;
  const std::string path = write(folder, {{{1, 2, 3}, 0}});
  const TokenDataset packed(TokenFile(path), {.seq = 3, .vocab = kVocab, .packing = true});
  const TokenDataset alone(TokenFile(path), {.seq = 3, .vocab = kVocab});
  Ids tokens(3), targets(3), positions(3);
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { packed.batch(0, 1, tokens, targets); }),
                  {"room for 3 positions, got 0"}));
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { alone.batch(0, 1, tokens, targets, positions); }),
                  {"room for 0 positions, got 3"}));
}

}  // namespace
}  // namespace tessera::tools
