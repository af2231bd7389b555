#include "tools/config/token_data_config.h"

#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tools/cli/flags.h"
#include "tools/data/token_dataset.h"
#include "tools/data/token_file.h"

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
  ASSERT_TRUE(flags.parse(std::vector<const char*>{"--data.path=a.bin", "--data.format=uint32",
                                                   "--data.order=sequential",
                                                   "--data.val_fraction=0.25", "--data.packing"},
                          out));
  EXPECT_EQ(c.path, "a.bin");
  EXPECT_EQ(c.format, TokenFormat::kUInt32);
  EXPECT_EQ(c.order, SampleOrder::kSequential);
  EXPECT_EQ(c.val_fraction, 0.25);
  EXPECT_TRUE(c.packing);
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
