// Flags: values of every kind, what is refused and how, and what is told of them.
#include "tools/cli/flags.h"
#include "tests/testing/json.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/io/text.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/cli/every_option.h"

namespace tessera::tools {
namespace {

using namespace std::literals;
using engine::InvalidArgument;
using testing::error_of;
using testing::has;
using testing::TempFolder;

TEST(Flags, SetFieldsOfEveryKindInBothSpellings) {
  Program p;
  EXPECT_TRUE(p.parse({"--parallel.strategy=zero3", "--model.layers", "12", "--train.seed=7",
                       "--train.lr", "3e-4", "--train.recompute", "--device=cuda",
                       "--data.path=", "--quiet=false", "--train.batch=9", "--model.dropout=0"}));
  EXPECT_EQ(p.strategy, "zero3");
  EXPECT_EQ(p.layers, 12);
  EXPECT_EQ(p.seed, 7u);
  EXPECT_EQ(p.batch, 9);
  EXPECT_EQ(p.lr, 3e-4);
  EXPECT_TRUE(p.recompute);
  EXPECT_EQ(p.device, Device::kCuda);
  EXPECT_EQ(p.path, "");
}

TEST(Flags, WithoutArgumentsKeepTheDefaults) {
  Program p;
  const char* argv[] = {"train"};
  EXPECT_TRUE(p.flags.parse(1, argv, p.out));
  EXPECT_EQ(p.layers, 2);
  EXPECT_EQ(p.strategy, "ddp");
}

TEST(Flags, BeatTheFileWhichBeatsTheDefaults) {
  const TempFolder folder;
  const std::string file = folder.write("run.toml",
                                        "quiet = true\n[parallel]\nstrategy = \"zero1\"\n"
                                        "[model]\nlayers = 8\ndropout = 0.25\n[train]\nlr = 1\n");
  Program p;
  EXPECT_TRUE(p.parse({"--model.layers=16", "--config", file.c_str()}));
  EXPECT_EQ(p.layers, 16);
  EXPECT_EQ(p.strategy, "zero1");
  EXPECT_EQ(p.dropout, 0.25);
  EXPECT_EQ(p.lr, 1.0);  // an integer will do for a number
  EXPECT_EQ(p.batch, 4);
  EXPECT_TRUE(p.quiet);
}

TEST(Flags, ThatAreUnknownGetASuggestion) {
  EXPECT_TRUE(has(Program().refusal({"--paralel.strategy=zero3"}),
                  {"--paralel.strategy", "did you mean parallel.strategy?"}));
  EXPECT_TRUE(has(Program().refusal({"--layers=3"}), {"--layers", "did you mean model.layers?"}));
  EXPECT_TRUE(has(Program().refusal({"--train.layers=3"}), {"did you mean model.layers?"}));
  EXPECT_TRUE(has(Program().refusal({"--colour=red"}), {"--colour", "--help lists"}));
}

TEST(Flags, RefuseBadValuesNamingFlagValueAndRange) {
  const struct {
    const char* argument;
    std::initializer_list<std::string_view> parts;
  } cases[] = {
      {"--parallel.strategy=zero9",
       {"one of ddp, zero1, zero3", "\"zero9\"", "(--parallel.strategy)"}},
      {"--device=tpu", {"one of cpu, cuda", "\"tpu\"", "(--device)"}},
      {"--model.layers=0", {"an integer in [1, 64]", "\"0\"", "(--model.layers)"}},
      {"--model.layers=65", {"an integer in [1, 64]"}},
      {"--model.layers=1e3x", {"an integer", "\"1e3x\""}},
      {"--model.layers=2.0", {"an integer"}},
      {"--model.layers= 2", {"an integer"}},
      {"--model.layers=", {"an integer"}},
      {"--train.batch=2147483648", {"an integer in [1, 2147483647]"}},
      {"--train.seed=9223372036854775808", {"an integer >= 0 of 64 bits"}},
      {"--train.lr=0", {"a finite number > 0"}},
      {"--train.lr=inf", {"a finite number > 0", "\"inf\""}},
      {"--train.lr=nan", {"a finite number > 0"}},
      {"--train.lr=1e999", {"a finite number > 0"}},
      {"--train.lr=1e3x", {"a finite number > 0", "\"1e3x\""}},
      {"--model.dropout=1", {"a number in [0, 1)"}},
      {"--model.dropout=-0.1", {"a number in [0, 1)"}},
      {"--train.recompute=yes", {"true or false", "\"yes\""}},
  };
  for (const auto& [argument, parts] : cases) {
    Program p;
    EXPECT_TRUE(has(p.refusal({argument}), parts)) << argument;
  }
}

TEST(Flags, TakeTheEdgesOfTheirRanges) {
  for (const std::int64_t layers : {1, 64}) {
    Program p;
    const std::string flag = "--model.layers=" + std::to_string(layers);
    EXPECT_TRUE(p.parse({flag.c_str(), "--train.batch=2147483647", "--model.dropout=0",
                         "--train.seed=9223372036854775807", "--train.lr=5e-324"}));
    EXPECT_EQ(p.layers, layers);
    EXPECT_EQ(p.batch, 2147483647);
    EXPECT_EQ(p.dropout, 0);
    EXPECT_EQ(p.seed, 9223372036854775807u);
    EXPECT_GT(p.lr, 0);
  }
  double share = -1;
  FlagSet flags("train", "");
  flags.add("share", &share, {.help = "", .min = -2, .max = 3});
  std::ostringstream out;
  for (const auto& [flag, value] : {std::pair{"--share=-2", -2.0}, {"--share=3", 3.0}}) {
    EXPECT_TRUE(flags.parse(std::vector<const char*>{flag}, out));
    EXPECT_EQ(share, value);
  }
}

TEST(Flags, WhatIsUsedAsF32IsInRangeAsF32) {
  double beta = 0.5, eps = 1;
  FlagSet flags("train", "");
  flags.add("beta", &beta, {.help = "", .min = 0, .max = 1, .below_max = true, .is_f32 = true});
  flags.add("eps", &eps, {.help = "", .min = 0, .above_min = true, .is_f32 = true});
  std::ostringstream out;
  const auto parse = [&](const char* flag) { flags.parse(std::vector<const char*>{flag}, out); };
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { parse("--beta=0.99999999"); }),
                  {"a number in [0, 1) of 32 bits", "\"0.99999999\"", "(--beta)"}));
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { parse("--eps=1e-60"); }),
                  {"a finite number > 0 of 32 bits", "\"1e-60\"", "(--eps)"}));
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { parse("--eps=1e60"); }), {"(--eps)"}));
  parse("--beta=0.9999999");
  parse("--eps=1e-40");
  EXPECT_EQ(beta, 0.9999999) << "not rounded itself";
  EXPECT_EQ(eps, 1e-40);
}

TEST(Flags, SomeCountsCanBeNoneOrAll) {
  constexpr std::int64_t kAll = std::numeric_limits<std::int64_t>::max();
  const testing::TempFolder folder;
  const auto parsed = [&](const std::string& argument) {
    std::int64_t blocks = 5;
    FlagSet flags("train", "");
    flags.add_switch("a.blocks", &blocks, "which", 7);
    EXPECT_TRUE(has(flags.help(), {"--a.blocks=5", "which (true or false, or 1 to 7)"}));
    std::ostringstream out;
    EXPECT_TRUE(flags.parse(std::vector<const char*>{argument.c_str()}, out));
    // What it says of itself says the same to another.
    const std::string toml = flags.to_toml();
    const std::int64_t value = std::exchange(blocks, 5);
    FlagSet again("train", "");
    again.add_switch("a.blocks", &blocks, "which", 7);
    const std::string file = "--config=" + folder.write("a.toml", toml);
    EXPECT_TRUE(again.parse(std::vector<const char*>{file.c_str()}, out));
    EXPECT_EQ(blocks, value) << toml;
    return value;
  };
  EXPECT_EQ(parsed("--a.blocks"), kAll);
  EXPECT_EQ(parsed("--a.blocks=true"), kAll);
  EXPECT_EQ(parsed("--a.blocks=false"), 0);
  EXPECT_EQ(parsed("--a.blocks=1"), 1);
  EXPECT_EQ(parsed("--a.blocks=7"), 7);
  for (const char* bad : {"0", "8", "-1", "1.5", "all", "", "True"}) {
    std::int64_t blocks = 5;
    FlagSet flags("train", "");
    flags.add_switch("a.blocks", &blocks, "which", 7);
    const std::string argument = std::string("--a.blocks=") + bad;
    std::ostringstream out;
    EXPECT_TRUE(has(error_of<InvalidArgument>(
                        [&] { flags.parse(std::vector<const char*>{argument.c_str()}, out); }),
                    {"true or false, or 1 to 7", std::string("\"") + bad + "\""}));
    EXPECT_EQ(blocks, 5);
  }
}

TEST(Flags, RefuseWhatIsNotAnOptionOrComesTwice) {
  EXPECT_TRUE(has(Program().refusal({"zero3"}), {"--name=value", "zero3"}));
  EXPECT_TRUE(has(Program().refusal({"-x"}), {"-x"}));
  EXPECT_TRUE(has(Program().refusal({"--train.recompute", "false"}), {"false"}));
  EXPECT_TRUE(has(Program().refusal({"--model.layers"}), {"no value", "--model.layers"}));
  EXPECT_TRUE(has(Program().refusal({"--model.layers", "--quiet"}), {"no value"}));
  EXPECT_TRUE(has(Program().refusal({"--config"}), {"a file", "no value"}));
  EXPECT_TRUE(has(Program().refusal({"--model.layers=1", "--model.layers", "2"}),
                  {"second", "--model.layers"}));
}

TEST(Flags, TextWithANulIsRefused) {
  EXPECT_TRUE(has(file_refusal("[data]\npath = \"book.txt\\u0000.evil\"\n"),
                  {"without NUL", "book.txt\\x00.evil", "run.toml:2: data.path"}));
  EXPECT_TRUE(has(file_refusal("\"data\\u0000.path\" = 1\n"), {"got data\\x00.path"}));
}

TEST(Flags, RefusalsCannotCommandATerminal) {
  const struct {
    const char* flag;
    std::string_view part;
  } flags[] = {{"--a\x1B[2J=1", "--a\\x1b[2J"},
               {"--device=\n\x1B", "\"\\n\\x1b\""},
               {"\xC2\x9B", "got \\u009b"},
               {"--data.path=\xFF", "\"\\xff\""},
               {"--model.layers=\x7F", "\"\\x7f\""}};
  for (const auto& [flag, part] : flags) {
    const std::string refusal = Program().refusal({flag});
    EXPECT_TRUE(has(refusal, {part}));
    EXPECT_EQ(engine::escaped(refusal), refusal);
  }
  const struct {
    const char* text;
    std::string_view part;
  } files[] = {{"\"a\\u001b[2J\" = 1\n", "a\\x1b[2J"},  {"device = \"\\n\\u001b\"\n", "'\\n\\x1b'"},
               {"device = \"\\u009b\"\n", "'\\u009b'"}, {"x = \x1B[2J\n", "run.toml:1"},
               {"\xC2\x9B = 1\n", "run.toml:1"},        {"x = \"\xFF\"\n", "run.toml:1"}};
  for (const auto& [text, part] : files) {
    const std::string refusal = file_refusal(text);
    EXPECT_TRUE(has(refusal, {part}));
    EXPECT_EQ(engine::escaped(refusal), refusal);
  }
}

TEST(Flags, ValuesInForceAreOneJsonObject) {
  Program p;
  p.parse({"--train.lr=0.1", "--quiet"});
  const auto json = testing::parse_json(p.flags.to_json());
  EXPECT_EQ(json.size(), 10u);
  EXPECT_EQ(json.at("train.lr"), 0.1);
  EXPECT_EQ(json.at("quiet"), true);
  EXPECT_EQ(json.at("parallel.strategy"), "ddp");
  EXPECT_EQ(json.at("device"), "cpu");
}

TEST(Flags, HelpListsEveryOptionWithDefaultAndRange) {
  Program p;
  EXPECT_FALSE(p.parse({"--model.layers=3", "--help"}));
  EXPECT_TRUE(has(p.out.str(),
                  {"Trains a model.", "[parallel]", "--parallel.strategy=\"ddp\"",
                   "who holds what (one of ddp, zero1, zero3)", "[model]",
                   "--model.layers=2\n      blocks (an integer in [1, 64])", "--device=\"cpu\"",
                   "--train.recompute=false", "true or false", "--config FILE"}));
  EXPECT_EQ(p.layers, 2);
}

TEST(Flags, VersionIsPrinted) {
  Program p;
  EXPECT_FALSE(p.parse({"--version"}));
  EXPECT_EQ(p.out.str(), "train 0.1.0\n");
}

TEST(Flags, NamesAreDeclaredOnceAndFree) {
  Program p;
  const auto refusal = [&](const char* name) {
    return error_of<InvalidArgument>([&] { p.flags.add(name, &p.quiet, {.help = ""}); });
  };
  EXPECT_TRUE(has(refusal("quiet"), {"quiet"}));
  EXPECT_TRUE(has(refusal("help"), {"help"}));
  EXPECT_TRUE(has(refusal("model"), {"model"}));
  EXPECT_TRUE(has(refusal("quiet.more"), {"quiet.more"}));
  EXPECT_TRUE(has(refusal("no spaces"), {"no spaces"}));
  EXPECT_TRUE(has(refusal("a..b"), {"a..b"}));
}

TEST(UserPaths, ResolveAgainstTheFolderWhereThePersonStands) {
  ASSERT_EQ(::setenv("BUILD_WORKING_DIRECTORY", "/home/somebody", 1), 0);
  EXPECT_EQ(resolve_user_path("run.toml"), "/home/somebody/run.toml");
  EXPECT_EQ(resolve_user_path("/data/x"), "/data/x");
  EXPECT_EQ(resolve_user_path(""), "");
  ASSERT_EQ(::unsetenv("BUILD_WORKING_DIRECTORY"), 0);
  EXPECT_EQ(resolve_user_path("run.toml"), "run.toml");
}

}  // namespace
}  // namespace tessera::tools
