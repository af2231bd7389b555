#include "tools/data/token_dataset.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tools/data/permutation.h"

namespace tessera::tools {
namespace {

using engine::InvalidArgument;
using engine::IoError;
using testing::error_of;
using testing::has;
using testing::TempFolder;

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

std::string llmc_header(std::int32_t magic, std::int32_t version, std::int32_t count) {
  std::vector<std::int32_t> header(256);
  header[0] = magic;
  header[1] = version;
  header[2] = count;
  return bytes_of(header);
}

template <class T>
std::vector<T> counting(std::int64_t n) {
  std::vector<T> values(static_cast<std::size_t>(n));
  std::iota(values.begin(), values.end(), T{0});
  return values;
}

struct Batch {
  std::vector<std::int32_t> tokens, targets;
};

Batch batch_of(const TokenDataset& data, std::int64_t first, std::int64_t batch) {
  const auto numel = static_cast<std::size_t>(batch * data.seq());
  Batch result{std::vector<std::int32_t>(numel), std::vector<std::int32_t>(numel)};
  data.batch(first, batch, result.tokens, result.targets);
  return result;
}

TEST(TokenFile, ReadsEveryFormat) {
  const TempFolder folder;
  const std::vector<std::uint16_t> narrow{5, 50256, 65535, 0};
  const std::vector<std::uint32_t> wide{5, 50256, 65536, 128000};
  const struct {
    std::string path;
    std::string_view format;
    std::vector<std::int32_t> tokens;
  } cases[] = {
      {folder.write("a.txt", "az\xFF\n"), "text", {'a', 'z', 255, '\n'}},
      {folder.write("a.bin", bytes_of(narrow)), "nanoGPT uint16", {5, 50256, 65535, 0}},
      {folder.write("b.bin", llmc_header(20240520, 1, 4) + bytes_of(narrow)),
       "llm.c uint16",
       {5, 50256, 65535, 0}},
      {folder.write("c.bin", llmc_header(20240801, 7, 4) + bytes_of(wide)),
       "llm.c uint32",
       {5, 50256, 65536, 128000}},
  };
  for (const auto& [path, format, tokens] : cases) {
    const TokenFile file(path);
    EXPECT_EQ(file.format(), format);
    ASSERT_EQ(file.num_tokens(), 4);
    std::vector<std::int32_t> all(4), middle(2);
    file.read(0, 1 << 20, all);
    EXPECT_EQ(all, tokens) << format;
    file.read(1, 1 << 20, middle);
    EXPECT_EQ(middle, std::vector(tokens.begin() + 1, tokens.begin() + 3)) << format;
  }
}

TEST(TokenFile, ReadsTheFormatThatIsAskedFor) {
  const TempFolder folder;
  const auto tokens = [](const std::string& path, TokenFormat format) {
    const TokenFile file(path, format);
    std::vector<std::int32_t> all(static_cast<std::size_t>(file.num_tokens()));
    file.read(0, 1 << 20, all);
    return all;
  };
  const std::string wide = folder.write("wide", bytes_of(std::vector<std::uint32_t>{7, 119'546}));
  EXPECT_EQ(tokens(wide, TokenFormat::kUInt32), (std::vector{7, 119'546}));
  EXPECT_EQ(tokens(wide, TokenFormat::kUInt16), (std::vector{7, 0, 54'010, 1}));
  EXPECT_EQ(tokens(wide, TokenFormat::kBytes), (std::vector{7, 0, 0, 0, 0xFA, 0xD2, 1, 0}));
  EXPECT_EQ(tokens(folder.write("a.bin", "PK\3\4"), TokenFormat::kBytes),
            (std::vector<std::int32_t>{'P', 'K', 3, 4}));
  const std::string llmc =
      folder.write("b.bin", llmc_header(20240520, 1, 1) + bytes_of(counting<std::uint16_t>(1)));
  for (const TokenFormat format : {TokenFormat::kUInt16, TokenFormat::kUInt32}) {
    EXPECT_TRUE(has(error_of<IoError>([&] { TokenFile(llmc, format); }),
                    {"llm.c uint16", "leave out --data.format"}));
  }
}

TEST(TokenFile, SaysWhatAFileIsThatHoldsNoTokens) {
  const TempFolder folder;
  for (const char* name : {"a.txt", "a.bin", "a"}) {
    const std::string path = folder.write(name, "\x93NUMPY\x01");
    EXPECT_TRUE(has(error_of<IoError>([&] { TokenFile{path}; }),
                    {"a NumPy .npy file", "tofile(", "--data.format=bytes", name}));
  }
  folder.write("val.bin", "ab");
  EXPECT_TRUE(has(error_of<IoError>([&] { TokenFile{folder.path()}; }),
                  {"a folder: give one of its files, such as a.bin, a.txt, val.bin"}));
}

TEST(TokenFile, RefusesFilesThatAreNotWhatTheySay) {
  const TempFolder folder;
  const std::string four = bytes_of(counting<std::uint16_t>(4));
  const struct {
    std::string path;
    std::initializer_list<std::string_view> parts;
  } cases[] = {
      {folder / "none.txt", {"none.txt", "No such file"}},
      {folder.path(), {"a folder"}},
      {"/dev/zero", {"a device", "/dev/zero"}},
      {folder.write("empty.txt", ""), {"empty file", "empty.txt"}},
      {folder.write("odd.bin", "abc"),
       {"2 bytes each", "got 3 bytes", "cut short", "--data.format", "odd.bin"}},
      {folder.write("one.bin", "a"), {"2 bytes each", "one.bin"}},
      {folder.write("version.bin", llmc_header(20240520, 2, 4) + four), {"version 1", "got 2"}},
      {folder.write("mixed.bin", llmc_header(20240801, 1, 2) + four), {"version 7", "got 1"}},
      {folder.write("negative.bin", llmc_header(20240520, 1, -1) + four), {"negative.bin"}},
      {folder.write("zero.bin", llmc_header(20240520, 1, 0)), {"zero.bin"}},
      {folder.write("huge.bin", llmc_header(20240520, 1, 0x7FFFFFFF) + four),
       {"huge.bin", "2147483647"}},
      {folder.write("short.bin", llmc_header(20240520, 1, 5) + four), {"1034 bytes", "got 1032"}},
      {folder.write("long.bin", llmc_header(20240520, 1, 3) + four), {"1030 bytes", "got 1032"}},
      {folder.write("head.bin", llmc_header(20240520, 1, 3).substr(0, 100)), {"head.bin"}},
  };
  for (const auto& [path, parts] : cases) {
    EXPECT_TRUE(has(error_of<IoError>([&path = path] { TokenFile{path}; }), parts)) << path;
  }
}

TEST(TokenDataset, RefusesTokensOutsideTheVocabularyNamingTheFirst) {
  const TempFolder folder;
  auto tokens = std::vector<std::uint16_t>(1'200'000, 99);
  tokens[1'100'001] = 100;
  tokens[1'100'005] = 7000;
  const std::string path = folder.write("a.bin", bytes_of(tokens));
  EXPECT_NO_THROW(TokenDataset(TokenFile(path), {.seq = 8, .vocab = 7001}));
  EXPECT_TRUE(
      has(error_of<IoError>([&] { TokenDataset(TokenFile(path), {.seq = 8, .vocab = 100}); }),
          {"vocabulary of 100", "got 100 at position 1100001", "(model.vocab, ", "a.bin"}));
  const std::string text = folder.write("b.txt", "abc\x80xyzxyz");
  EXPECT_TRUE(
      has(error_of<IoError>([&] { TokenDataset(TokenFile(text), {.seq = 2, .vocab = 128}); }),
          {"got 128 at position 3", "b.txt"}));
  const std::vector<std::uint32_t> wide{0, 0xFFFFFFFF, 0};
  const std::string llmc = folder.write("c.bin", llmc_header(20240801, 7, 3) + bytes_of(wide));
  EXPECT_TRUE(
      has(error_of<IoError>([&] { TokenDataset(TokenFile(llmc), {.seq = 1, .vocab = 1 << 30}); }),
          {"got 4294967295 at position 1"}));
}

TEST(TokenDataset, ChecksEveryTokenOfALongFile) {
  const TempFolder folder;
  constexpr std::int64_t kNumTokens = 1'048'579,
                         kPiece = 1 << 19;  // two pieces that are read, and 3
  for (const std::int64_t at :
       {std::int64_t{0}, kPiece - 1, kPiece, kPiece + 1, 2 * kPiece, kNumTokens - 1}) {
    auto tokens = std::vector<std::uint16_t>(kNumTokens, 9);
    tokens[static_cast<std::size_t>(at)] = 10;
    const std::string path = folder.write("a.bin", bytes_of(tokens));
    EXPECT_NO_THROW(TokenDataset(TokenFile(path), {.seq = 8, .vocab = 11}));
    EXPECT_TRUE(
        has(error_of<IoError>([&] { TokenDataset(TokenFile(path), {.seq = 8, .vocab = 10}); }),
            {fmt::format("got 10 at position {}:", at)}));
  }
  const std::string bytes = folder.write("a.txt", "abc\xFF");
  EXPECT_NO_THROW(TokenDataset(TokenFile(bytes), {.seq = 2, .vocab = 256}));
  EXPECT_TRUE(
      has(error_of<IoError>([&] { TokenDataset(TokenFile(bytes), {.seq = 2, .vocab = 255}); }),
          {"got 255 at position 3"}));
}

TEST(TokenDataset, TargetsAreTheTokensShiftedByOne) {
  const TempFolder folder;
  const TokenFile file(folder.write("a.bin", bytes_of(counting<std::uint16_t>(14))));
  const TokenDataset data(TokenFile(file.path()), {.seq = 4, .vocab = 14});
  EXPECT_EQ(data.num_sequences(), 3);  // tokens 12 and 13: a target, and a rest
  const Batch batch = batch_of(data, 1, 3);
  EXPECT_EQ(batch.tokens, (std::vector<std::int32_t>{4, 5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 3}));
  EXPECT_EQ(batch.targets, (std::vector<std::int32_t>{5, 6, 7, 8, 9, 10, 11, 12, 1, 2, 3, 4}));
}

TEST(TokenDataset, ASequenceNeedsOneTokenMoreForItsLastTarget) {
  const TempFolder folder;
  const auto count = [&](std::int64_t num_tokens) {
    const std::string path = folder.write("a.bin", bytes_of(counting<std::uint16_t>(num_tokens)));
    return TokenDataset(TokenFile(path), {.seq = 4}).num_sequences();
  };
  EXPECT_EQ(count(5), 1);
  EXPECT_EQ(count(8), 1);
  EXPECT_EQ(count(9), 2);
  EXPECT_TRUE(has(error_of<IoError>([&] { count(4); }),
                  {"at least 5 tokens", "sequence of 4", "got 4", "a.bin"}));
}

TEST(TokenDataset, KeepsTheEndForValidation) {
  const TempFolder folder;
  const std::string path = folder.write("a.bin", bytes_of(counting<std::uint16_t>(41)));
  const TokenDataset data(TokenFile(path), {.seq = 4, .val_fraction = 0.25});
  EXPECT_EQ(data.num_sequences(), 8);
  ASSERT_EQ(data.num_val_sequences(), 2);
  std::vector<std::int32_t> tokens(8), targets(8);
  data.val_batch(0, 2, tokens, targets);
  EXPECT_EQ(tokens, (std::vector<std::int32_t>{32, 33, 34, 35, 36, 37, 38, 39}));
  EXPECT_EQ(targets.back(), 40);
  EXPECT_EQ(batch_of(data, 8, 1).tokens.front(), 0);  // training wraps before validation
  EXPECT_TRUE(
      has(error_of<InvalidArgument>([&] { data.val_batch(1, 2, tokens, targets); }), {"below 2"}));
  EXPECT_EQ(TokenDataset(TokenFile(path), {.seq = 4, .val_fraction = 0.001}).num_val_sequences(),
            1);
  EXPECT_EQ(TokenDataset(TokenFile(path), {.seq = 4}).num_val_sequences(), 0);
  EXPECT_TRUE(has(
      error_of<IoError>([&] { TokenDataset(TokenFile(path), {.seq = 30, .val_fraction = 0.1}); }),
      {"at least 61 tokens", "got 41"}));
}

TEST(TokenDataset, ShuffleVisitsEverySequenceOnceAnEpochAndDiffersByEpochAndSeed) {
  const TempFolder folder;
  const std::string path = folder.write("a.bin", bytes_of(counting<std::uint16_t>(401)));
  const auto epoch = [&](std::uint64_t seed, std::int64_t number) {
    const TokenDataset data(TokenFile(path),
                            {.seq = 4, .vocab = 512, .order = SampleOrder::kShuffle, .seed = seed});
    std::vector<std::int32_t> order;
    for (std::int64_t i = 0; i < 100; ++i) {
      order.push_back(batch_of(data, number * 100 + i, 1).tokens.front() / 4);
    }
    return order;
  };
  const auto first = epoch(1, 0);
  for (std::int64_t number = 0; number < 4; ++number) {
    const auto order = epoch(1, number);
    EXPECT_EQ(std::set(order.begin(), order.end()).size(), 100u) << number;
  }
  EXPECT_FALSE(std::ranges::is_sorted(first));
  EXPECT_EQ(first, epoch(1, 0));
  EXPECT_NE(first, epoch(1, 1));
  EXPECT_NE(first, epoch(2, 0));
}

TEST(TokenDataset, SamplesDoNotDependOnHowTheyAreDealt) {
  const TempFolder folder;
  const std::string path = folder.write("a.bin", bytes_of(counting<std::uint16_t>(401)));
  const TokenDataset data(TokenFile(path),
                          {.seq = 4, .vocab = 512, .order = SampleOrder::kShuffle, .seed = 3});
  const Batch whole = batch_of(data, 96, 12);  // across the end of an epoch
  Batch parts;
  for (std::int64_t first = 96; first < 108; first += 3) {
    const Batch part = batch_of(data, first, 3);
    parts.tokens.insert(parts.tokens.end(), part.tokens.begin(), part.tokens.end());
    parts.targets.insert(parts.targets.end(), part.targets.begin(), part.targets.end());
  }
  EXPECT_EQ(whole.tokens, parts.tokens);
  EXPECT_EQ(whole.targets, parts.targets);
}

TEST(TokenDataset, AFileThatShrinksOrChangesDuringTrainingIsAnError) {
  const TempFolder folder;
  const std::string path = folder.write("a.bin", bytes_of(counting<std::uint16_t>(4001)));
  const TokenDataset data(TokenFile(path), {.seq = 1000, .vocab = 4001});
  std::vector<std::int32_t> tokens(1000), targets(1000);
  folder.write("b.bin", bytes_of(std::vector<std::uint16_t>(4001, 60000)));
  std::filesystem::copy_file(folder / "b.bin", path,
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_TRUE(has(error_of<IoError>([&] { data.batch(0, 1, tokens, targets); }),
                  {"vocabulary of 4001", "got 60000", "a.bin"}));
  std::filesystem::resize_file(path, 100);
  EXPECT_TRUE(has(error_of<IoError>([&] { data.batch(3, 1, tokens, targets); }),
                  {"the end of the file", "a.bin"}));
}

TEST(TokenDataset, ReadsBeyondFourGigabytes) {
  const TempFolder folder;
  const std::string path = folder.write("a.bin", "");
  std::filesystem::resize_file(path, (std::uintmax_t{1} << 32) + 200);  // sparse
  const TokenFile file(path);
  std::vector<std::int32_t> last(1, -1);
  file.read(file.num_tokens() - 1, 1, last);
  EXPECT_EQ(last.front(), 0);
  EXPECT_EQ(file.num_tokens(), (std::int64_t{1} << 31) + 100);
}

TEST(TokenDataset, RefusesOptionsAndBuffersOutOfRange) {
  const TempFolder folder;
  const std::string path = folder.write("a.txt", "some text");
  for (const TokenDatasetOptions& options :
       {TokenDatasetOptions{.seq = 0}, TokenDatasetOptions{.seq = 2, .vocab = 0},
        TokenDatasetOptions{.seq = 2, .val_fraction = 1.0},
        TokenDatasetOptions{.seq = 2, .val_fraction = -0.5}}) {
    EXPECT_THROW(TokenDataset(TokenFile(path), options), InvalidArgument);
  }
  const TokenDataset data(TokenFile(path), {.seq = 2});
  std::vector<std::int32_t> four(4), three(3);
  EXPECT_THROW(data.batch(0, 2, four, three), InvalidArgument);
  EXPECT_THROW(data.batch(0, 2, three, four), InvalidArgument);
  EXPECT_THROW(data.batch(-1, 2, four, four), InvalidArgument);
}

/// A file of documents, of which the first tokens are not learned.
std::string documents_of(
    const std::vector<std::pair<std::vector<std::uint32_t>, std::size_t>>& documents) {
  std::vector<std::uint32_t> tokens;
  std::vector<std::int64_t> numbers(2);  // of tokens and documents, and where each ends
  for (const auto& [ids, num_not_learned] : documents) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      tokens.push_back(i < num_not_learned ? ids[i] | kNotLearned : ids[i]);
    }
    numbers.push_back(std::ssize(tokens));
  }
  numbers[0] = std::ssize(tokens);
  numbers[1] = std::ssize(documents);
  return llmc_header(kDocumentsMagic, 1, 0) + bytes_of(numbers) + bytes_of(tokens);
}

constexpr std::int32_t kNo = kMasked;

TEST(Documents, AreSequencesOfTheirOwnWhoseTargetsAreWhatIsLearned) {
  const TempFolder folder;
  const std::string path = folder.write("a.bin", documents_of({{{1, 2, 3, 4, 5, 6, 7}, 3},
                                                               {{8}, 0},
                                                               {{9, 10}, 2},
                                                               {{11, 12, 13}, 0},
                                                               {{14, 15, 16, 17}, 1}}));
  const TokenFile file(path);
  EXPECT_EQ(file.format(), "documents");
  EXPECT_EQ(file.max_possible_token(), (std::int64_t{1} << 31) - 1);  // a bit says what is learned
  EXPECT_EQ(file.document_ends(), (std::vector<std::int64_t>{7, 8, 10, 13, 17}));
  std::vector<std::int32_t> ids(4);
  file.read(1, 18, ids);
  EXPECT_EQ(ids, (std::vector{2, 3, 4, 5}));
  file.read_targets(1, 18, ids);
  EXPECT_EQ(ids, (std::vector{kNo, kNo, 4, 5}));
  std::vector<std::int32_t> targets(4);
  file.read(1, 18, ids, targets);
  EXPECT_EQ(ids, (std::vector{2, 3, 4, 5}));
  EXPECT_EQ(targets, (std::vector{kNo, kNo, 4, 5}));
  EXPECT_THROW(file.read(1, 18, ids, std::span(targets).first(3)), InvalidArgument);
  // Of the first document two parts, of the second and the third none.
  const TokenDataset data(TokenFile(path), {.seq = 4, .vocab = 18});
  ASSERT_EQ(data.num_sequences(), 4);
  EXPECT_TRUE(data.keeps_documents());
  EXPECT_EQ(data.max_token(), 17);
  const Batch batch = batch_of(data, 0, 4);
  EXPECT_EQ(batch.tokens, (std::vector{1, 2, 3, 4, 5, 6, 0, 0, 11, 12, 0, 0, 14, 15, 16, 0}));
  EXPECT_EQ(batch.targets,
            (std::vector{kNo, kNo, 4, 5, 6, 7, kNo, kNo, 12, 13, kNo, kNo, 15, 16, 17, kNo}));
  EXPECT_EQ(data.cut().num_targets, 9);
  EXPECT_EQ(data.cut().num_tokens, 4 + 2 + 2 + 3);
  EXPECT_EQ(data.cut().num_documents, 5);
  EXPECT_EQ(data.cut().num_longer, 1);
  EXPECT_EQ(data.cut().num_not_learned, 2);
  EXPECT_EQ(data.cut().num_left_out, 0);
  EXPECT_EQ(data.cut().longest, 7);
  const TokenDataset shorter(TokenFile(path), {.seq = 2, .vocab = 18});
  EXPECT_EQ(shorter.cut().num_longer, 2);
  EXPECT_EQ(shorter.cut().num_left_out, 1);
  for (std::int64_t i = 0; i < 4; ++i) {
    const Batch one = batch_of(data, i, 1);
    EXPECT_EQ(data.num_targets(i, 1), 4 - std::ranges::count(one.targets, kNo)) << i;
  }
  EXPECT_EQ(data.num_targets(2, 4), 2 + 3 + 2 + 2);  // into the next epoch
}

TEST(Documents, AreKeptForValidationFromTheEnd) {
  const TempFolder folder;
  const std::string path = folder.write(
      "a.bin", documents_of({{{1, 2}, 0}, {{3, 4, 5}, 0}, {{6, 7, 8}, 2}, {{9, 10}, 0}}));
  const TokenDataset data(TokenFile(path), {.seq = 8, .vocab = 18, .val_fraction = 0.5});
  EXPECT_EQ(data.num_sequences(), 2);
  ASSERT_EQ(data.num_val_sequences(), 2);
  std::vector<std::int32_t> tokens(8), targets(8);
  data.val_batch(0, 1, tokens, targets);
  EXPECT_EQ(tokens, (std::vector{6, 7, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(targets, (std::vector{kNo, 8, kNo, kNo, kNo, kNo, kNo, kNo}));
  EXPECT_EQ(data.num_val_targets(0, 2), 2);
  EXPECT_EQ(data.cut().num_targets, 1 + 2);
}

TEST(Documents, WhoseMarksChangeDuringTrainingAreAnError) {
  const TempFolder folder;
  const std::string path = folder.write("a.bin", documents_of({{{1, 2, 3}, 0}, {{4, 5, 6}, 0}}));
  const TokenDataset data(TokenFile(path), {.seq = 4, .vocab = 18});
  folder.write("b.bin", documents_of({{{1, 2, 3}, 0}, {{4, 5, 6}, 2}}));
  std::filesystem::copy_file(folder / "b.bin", path,
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_EQ(batch_of(data, 0, 1).targets[1], 3);
  EXPECT_TRUE(has(error_of<IoError>([&] { batch_of(data, 1, 1); }),
                  {"expected 2 tokens to learn from position 3", "got 1", "a.bin"}));
}

TEST(Documents, RefusesFilesThatAreNotWhatTheySay) {
  const TempFolder folder;
  const std::string whole = documents_of({{{1, 2, 3}, 1}, {{4, 5}, 0}});
  const auto with = [&](std::size_t at, std::int64_t value) {
    std::string bytes = whole;
    bytes.replace(at, sizeof value, reinterpret_cast<const char*>(&value), sizeof value);
    return bytes;
  };
  std::string newer = whole;
  newer[4] = 2;
  const std::pair<std::string, std::string> cases[] = {
      {newer, "documents of version 1, got 2"},
      {whole.substr(0, 1030), "got a file of 1030 bytes"},
      {whole.substr(0, whole.size() - 4),
       "the 5 tokens and 2 documents of the header, got a file of 1072 bytes"},
      {whole + "four", "of the header, got a file of 1080 bytes"},
      {with(1024, 0), "the 0 tokens"},
      {with(1032, std::int64_t{1} << 62), "documents of the header"},
      {with(1032, -1), "-1 documents"},
      {with(1040, 0), "one from 0 to 0"},
      {with(1040, 6), "one from 0 to 6"},
      {with(1048, 4), "the last document to end with the 5 tokens, got 4"},
  };
  for (const auto& [bytes, what] : cases) {
    const std::string path = folder.write("a.bin", bytes);
    EXPECT_TRUE(has(error_of<IoError>([&] { TokenFile{path}; }), {"[token_file]", what, "a.bin"}));
  }
  const std::string renamed = folder.write("a", whole);
  EXPECT_TRUE(has(error_of<IoError>([&] { TokenFile{renamed}; }), {"called .bin"}));
  EXPECT_TRUE(has(error_of<IoError>([&] { TokenFile(folder / "a.bin", TokenFormat::kBytes); }),
                  {"expected bytes, got documents", "leave out --data.format", "a.bin"}));
  EXPECT_TRUE(TokenFile(renamed, TokenFormat::kBytes).is_bytes());
  const std::string path = folder.write("a.bin", whole);
  EXPECT_TRUE(has(error_of<IoError>([&] { TokenDataset(TokenFile(path), {.seq = 4, .vocab = 5}); }),
                  {"vocabulary of 5", "got 5 at position 4"}));
  const std::string single = folder.write("c.bin", documents_of({{{1, 2}, 0}}));
  EXPECT_TRUE(has(
      error_of<IoError>([&] { TokenDataset(TokenFile(single), {.seq = 4, .val_fraction = 0.1}); }),
      {"documents for training and validation", "data.val_fraction", "c.bin"}));
  const std::string prompts = folder.write("b.bin", documents_of({{{1, 2}, 2}, {{3}, 0}}));
  EXPECT_TRUE(has(error_of<IoError>([&] { TokenDataset(TokenFile(prompts), {.seq = 4}); }),
                  {"some token after the first is learned, got none", "b.bin"}));
}

TEST(Permutation, IsABijectionForEverySize) {
  for (const std::int64_t n : {1, 2, 3, 4, 5, 15, 16, 17, 100, 1023, 1025, 4096}) {
    for (std::uint64_t epoch = 0; epoch < 3; ++epoch) {
      std::vector<int> visits(static_cast<std::size_t>(n));
      for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t value = permuted(i, n, 11, epoch);
        ASSERT_TRUE(value >= 0 && value < n);
        ++visits[static_cast<std::size_t>(value)];
      }
      EXPECT_EQ(std::ranges::count(visits, 1), n) << n;
    }
  }
}

TEST(Permutation, SpreadsEveryPositionEvenly) {
  // Where position 3 of 10 goes, over 10,000 epochs: chi-squared with 9 degrees of freedom is
  // below 33.7 in all but one of 10,000 cases.
  std::vector<double> counts(10);
  for (std::uint64_t epoch = 0; epoch < 10'000; ++epoch) {
    ++counts[static_cast<std::size_t>(permuted(3, 10, 5, epoch))];
  }
  double chi_squared = 0;
  for (const double count : counts) chi_squared += (count - 1000) * (count - 1000) / 1000;
  EXPECT_LT(chi_squared, 33.7);
}

TEST(Permutation, SpreadsPairsOfPositionsEvenly) {
  // Where neighbours go, and positions that differ in one half of the network alone: over 90,000
  // epochs 1,000 times to each of 90 pairs. Chi-squared with 89 degrees of freedom is below 148 in
  // all but one of 10,000 cases.
  for (const auto& [a, b] : {std::pair{0, 1}, std::pair{1, 5}, std::pair{3, 9}}) {
    std::vector<double> counts(100);
    for (std::uint64_t epoch = 0; epoch < 90'000; ++epoch) {
      ++counts[static_cast<std::size_t>(permuted(a, 10, 5, epoch) * 10 +
                                        permuted(b, 10, 5, epoch))];
    }
    double chi_squared = 0;
    for (std::size_t i = 0; i < 100; ++i) {
      if (i / 10 == i % 10) continue;  // never: see IsABijectionForEverySize
      chi_squared += (counts[i] - 1000) * (counts[i] - 1000) / 1000;
    }
    EXPECT_LT(chi_squared, 148) << a << ", " << b;
  }
}

// A seed means the same order in every version: a run can be repeated.
TEST(Permutation, IsTheSameInEveryVersion) {
  const auto order = [](std::int64_t n, std::uint64_t seed, std::uint64_t epoch) {
    std::vector<std::int64_t> values;
    for (std::int64_t i = 0; i < 10; ++i) values.push_back(permuted(i, n, seed, epoch));
    return values;
  };
  using Order = std::vector<std::int64_t>;
  EXPECT_EQ(order(10, 1337, 0), (Order{7, 5, 6, 1, 4, 3, 2, 8, 9, 0}));
  EXPECT_EQ(order(10, 1337, 1), (Order{0, 9, 6, 8, 4, 7, 2, 1, 5, 3}));
  EXPECT_EQ(order(60'000, 0x123456789ABCDEF0, 3),
            (Order{2192, 1131, 33992, 58022, 5862, 5421, 42353, 17668, 42213, 51294}));
}

TEST(Permutation, HandlesLargeSizes) {
  const std::int64_t n = (std::int64_t{1} << 40) + 12345;
  std::set<std::int64_t> values;
  for (std::int64_t i = 0; i < 1000; ++i) values.insert(permuted(i, n, 1, 0));
  EXPECT_EQ(values.size(), 1000u);
  EXPECT_LT(*values.rbegin(), n);
  EXPECT_GT(*values.rbegin(), n / 2);
}

}  // namespace
}  // namespace tessera::tools
