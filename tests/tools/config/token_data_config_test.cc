#include "tools/config/token_data_config.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tools/cli/flags.h"
#include "tools/data/token_dataset.h"
#include "tools/data/token_file.h"
#include "tools/data/token_mix.h"

namespace tessera::tools {
namespace {

using testing::error_of;
using testing::has;
using testing::TempFolder;

TEST(TokenDataConfig, EveryFlagSetsItsOwnField) {
  TokenDataConfig c;
  FlagSet flags("train", "");
  c.add_to(flags);
  std::ostringstream out;
  ASSERT_TRUE(
      flags.parse(std::vector<const char*>{"--data.path=a.bin", "--data.mix=b.bin:2",
                                           "--data.format=uint32", "--data.order=sequential",
                                           "--data.val_fraction=0.25", "--data.packing"},
                  out));
  EXPECT_EQ(c.path, "a.bin");
  EXPECT_EQ(c.mix, "b.bin:2");
  EXPECT_EQ(c.format, TokenFormat::kUInt32);
  EXPECT_EQ(c.order, SampleOrder::kSequential);
  EXPECT_EQ(c.val_fraction, 0.25);
  EXPECT_TRUE(c.packing);
}

TEST(TokenDataConfig, AMixIsFilesWithWeights) {
  const std::vector<TokenSource> sources = parse_mix("/a.bin:0.7,/b:c.txt:3e-1");
  ASSERT_EQ(sources.size(), 2U);
  EXPECT_EQ(sources[0].path, "/a.bin");
  EXPECT_EQ(sources[0].weight, 0.7);
  EXPECT_EQ(sources[1].path, "/b:c.txt");
  EXPECT_EQ(sources[1].weight, 0.3);
  EXPECT_EQ(mix_option(sources), "/a.bin:0.7,/b:c.txt:0.3");
  for (const char* bad : {"/a.bin", "/a.bin:", ":1", "/a:0", "/a:-1", "/a:nan", "/a:inf", "/a:1x",
                          "/a:1,", ",/a:1", "/a:1,,/b:1", "/a:1 ,/b:1", "/a: 1"}) {
    EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] { parse_mix(bad); }),
                    {"expected FILE:WEIGHT", bad, "data.mix"}))
        << bad;
  }
  EXPECT_TRUE(has(error_of<engine::InvalidArgument>([] { parse_mix("/a:1,/b:1,/a:2"); }),
                  {"a file once, got /a twice", "data.mix"}));
  EXPECT_THROW(parse_mix("/a:1,/b:1e-9"), engine::InvalidArgument);
}

TEST(TokenDataConfig, SourcesAreAPathOrAMix) {
  const TempFolder folder;
  TokenDataConfig c;
  EXPECT_TRUE(c.given_sources().empty());
  c.mix = folder.write("a.txt", "some text") + ":3," + folder.write("b.txt", "other text") + ":1";
  ASSERT_EQ(c.sources().size(), 2U);
  EXPECT_EQ(c.run_files(c.sources())[1].option, "data.mix");
  EXPECT_EQ(c.files_if_there().size(), 2U);
  c.val_fraction = 0;
  const TokenMix data = c.dataset(c.fit(256, ""), 4, 1);
  EXPECT_EQ(data.quotas(), (std::vector<std::int64_t>{3072, 1024}));
  EXPECT_EQ(data.num_sequences(), 2 + 2);
  c.path = folder / "a.txt";
  EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] { c.sources(); }),
                  {"expected data.path or data.mix, got both"}));
  c.mix = "";
  EXPECT_EQ(c.sources()[0].path, c.path);
  EXPECT_EQ(c.run_files(c.sources())[0].option, "data.path");
  c.path = folder / "missing.txt";
  EXPECT_EQ(c.files_if_there().size(), 0U);
}

// Two sources of one size would go hand in hand otherwise.
TEST(TokenDataConfig, EachSourceHasAnOrderOfItsOwn) {
  const TempFolder folder;
  std::string text;
  for (int i = 0; i < 201; ++i) text += static_cast<char>('a' + i * i % 23);
  TokenDataConfig c;
  c.val_fraction = 0;
  c.mix = folder.write("a.txt", text) + ":1," + folder.write("b.txt", text) + ":1";
  const TokenMix data = c.dataset(c.fit(256, ""), 2, 1);
  std::vector<std::int32_t> tokens[2] = {std::vector<std::int32_t>(200),
                                         std::vector<std::int32_t>(200)};
  std::vector<std::int32_t> targets(200);
  for (std::size_t i : {0, 1}) data.sources()[i].batch(0, 100, tokens[i], targets);
  EXPECT_NE(tokens[0], tokens[1]);
}

TEST(TokenDataConfig, PackingNeedsDocuments) {
  const TempFolder folder;
  TokenDataConfig c;
  c.path = folder.write("a.txt", "text, in which nothing is a document");
  c.val_fraction = 0;
  EXPECT_EQ(c.dataset(c.fit(256, ""), 4, 1).num_sequences(), 8);
  c.packing = true;
  EXPECT_TRUE(
      has(error_of<engine::InvalidArgument>([&] { c.dataset(c.fit(256, ""), 4, 1); }),
          {"expected documents to pack, got text", "//tools:tokenize", "data.packing", "a.txt"}));
}

}  // namespace
}  // namespace tessera::tools
