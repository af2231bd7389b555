// Which configurations a command line asks for.
#include "tools/compare/request/sweep.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"

namespace tessera::tools {
namespace {

using testing::error_of;
using testing::has;

std::vector<std::string> names_of(const std::vector<SweepAxis>& axes) {
  std::vector<std::string> names;
  const std::vector<Overrides> all = combinations(axes);
  for (const Overrides& overrides : all) names.push_back(name_of(overrides));
  return names;
}

TEST(Sweep, IsEveryValueWithEveryOtherTheLastChangingFastest) {
  std::vector<SweepAxis> axes = parse_sweep("parallel.prefetch=0,1,2  offload.optimizer=0,0.5");
  ASSERT_EQ(axes.size(), 2u);
  EXPECT_EQ(axes[1], (SweepAxis{"offload.optimizer", {"0", "0.5"}}));
  axes.insert(axes.begin(), parse_axis("parallel.strategy", "ddp,zero3"));
  const std::vector<std::string> names = names_of(axes);
  ASSERT_EQ(names.size(), 12u);
  EXPECT_EQ(names[0], "ddp prefetch=0 offload.optimizer=0");
  EXPECT_EQ(names[1], "ddp prefetch=0 offload.optimizer=0.5");
  EXPECT_EQ(names[2], "ddp prefetch=1 offload.optimizer=0");
  EXPECT_EQ(names[11], "zero3 prefetch=2 offload.optimizer=0.5");
  EXPECT_EQ(names_of({}), (std::vector<std::string>{"as given"}));
  EXPECT_EQ(combinations(parse_sweep("data.path=a=b"))[0], (Overrides{{"data.path", "a=b"}}));
}

TEST(Sweep, WhatIsNoneIsRefused) {
  const auto refused = [](const char* text) {
    return error_of<engine::Error>([&] { combinations(parse_sweep(text)); });
  };
  EXPECT_TRUE(has(refused("parallel.prefetch"), {"expected key=value,value"}));
  EXPECT_TRUE(has(refused("=1"), {"expected key=value,value"}));
  EXPECT_TRUE(has(refused("a="), {"got an empty one (a=)"}));
  EXPECT_TRUE(has(refused("a=1,,2"), {"got an empty one (a=1,,2)"}));
  EXPECT_TRUE(has(refused("a=1,2,"), {"got an empty one"}));
  EXPECT_TRUE(has(refused("a=1,2,1"), {"got 1 twice (a)"}));
  EXPECT_TRUE(has(refused("a=1 b=2 a=3"), {"got a twice"}));
  for (const char* output : {"out=a,b", "save.final=a", "log.jsonl=a", "config=a,b"}) {
    EXPECT_TRUE(has(refused(output), {"which says what is written"})) << output;
  }
  EXPECT_TRUE(has(refused("rates.link_gbs=1,2"), {"changes plans alone: add --plan"}));
  EXPECT_EQ(parse_sweep("rates.link_gbs=1,2", /*only_plans=*/true)[0].values.size(), 2u);
  std::string many = "0";
  for (int i = 1; i < 17; ++i) many.append(",").append(std::to_string(i));
  EXPECT_TRUE(has(refused(("a=" + many + " b=" + many).c_str()), {"at most 256"}));
  const std::string sixteen = many.substr(0, many.rfind(','));
  EXPECT_EQ(combinations(parse_sweep("a=" + sixteen + " b=" + sixteen)).size(), 256u);
  EXPECT_TRUE(has(refused(("a=" + sixteen + " b=" + many).c_str()),
                  {"expected at most 256 configurations, got more (at b)"}));
  std::string one_more = "a=0";  // 257, which is no product
  for (int i = 1; i <= 256; ++i) one_more.append(",").append(std::to_string(i));
  EXPECT_TRUE(has(refused(one_more.c_str()), {"at most 256", "(at a)"}));
}

TEST(Sweep, FoldersHaveNamesOfPlainLetters) {
  EXPECT_EQ(folder_name_of("zero3 prefetch=1"), "zero3_prefetch=1");
  EXPECT_EQ(folder_name_of("../a b\n"), "_.._a_b_");
}

TEST(Sweep, ARecordIsWhatIsNoStrategyAndExistsOrHasTheNameOfOne) {
  const testing::TempFolder folder;
  ASSERT_EQ(::setenv("BUILD_WORKING_DIRECTORY", (folder / "").c_str(), 1), 0);
  for (const char* name : {"ddp", "mine", "lr=0.1"})
    std::filesystem::create_directory(folder / name);
  EXPECT_FALSE(is_record_path("ddp")) << "a strategy, whatever folder there is";
  EXPECT_TRUE(is_record_path("./ddp"));
  EXPECT_TRUE(is_record_path("mine"));
  EXPECT_TRUE(is_record_path("lr=0.1"));
  EXPECT_TRUE(is_record_path("runs/lr=0.2/probe.jsonl"));
  EXPECT_TRUE(is_record_path("runs/none"));
  EXPECT_FALSE(is_record_path("lr=0.2"));
  EXPECT_FALSE(is_record_path("data.path=/data/text parallel.strategy=ddp"));
  EXPECT_FALSE(is_record_path("zero4"));
  EXPECT_FALSE(is_record_path(""));
}

}  // namespace
}  // namespace tessera::tools
