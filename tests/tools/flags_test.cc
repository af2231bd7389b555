#include "tools/flags.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"

namespace tessera::tools {
namespace {

using engine::InvalidArgument;
using engine::IoError;
using testing::error_of;
using testing::has;
using testing::TempFolder;

enum class Device { kCpu, kCuda };

/// A configuration with an option of every kind.
struct Program {
  std::string strategy = "ddp";
  std::int64_t layers = 2;
  int batch = 4;
  std::uint64_t seed = 1;
  double lr = 0.001;
  double dropout = 0;
  bool recompute = false;
  Device device = Device::kCpu;
  std::string path;
  bool quiet = false;
  FlagSet flags{"train", "Trains a model."};
  std::ostringstream out;

  Program() {
    flags.add("parallel.strategy", &strategy,
              {.help = "who holds what", .choices = {"ddp", "zero1", "zero3"}});
    flags.add("model.layers", &layers, {.help = "blocks", .min = 1, .max = 64});
    flags.add("train.batch", &batch, {.help = "samples of a step", .min = 1});
    flags.add("train.seed", &seed, {.help = "of all that is random", .min = 0});
    flags.add("train.lr", &lr, {.help = "learning rate", .min = 0, .above_min = true});
    flags.add("model.dropout", &dropout, {.help = "share", .min = 0, .max = 1, .below_max = true});
    flags.add("train.recompute", &recompute, {.help = "save memory"});
    flags.add("device", &device,
              {.help = "where", .choices = {{"cpu", Device::kCpu}, {"cuda", Device::kCuda}}});
    flags.add("data.path", &path, {.help = "tokens"});
    flags.add("quiet", &quiet, {.help = "say less"});
  }
  bool parse(std::vector<const char*> arguments) { return flags.parse(arguments, out); }
  std::string refusal(std::vector<const char*> arguments) {
    return error_of<InvalidArgument>([&] { parse(std::move(arguments)); });
  }
};

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

TEST(ConfigFile, ErrorsNameFileLineAndKey) {
  const struct {
    const char* text;
    std::initializer_list<std::string_view> parts;
  } cases[] = {
      {"[model]\n\nlayer = 3\n", {"run.toml:3: model.layer", "did you mean model.layers?"}},
      {"[modle]\n", {"run.toml:1: modle"}},
      {"model = 3\n", {"run.toml:1: model"}},
      {"[model]\nlayers = 99\n", {"run.toml:2: model.layers", "an integer in [1, 64]", "got 99"}},
      {"[model]\nlayers = \"3\"\n", {"run.toml:2", "an integer in [1, 64]", "got '3'"}},
      {"[model]\nlayers = 3.0\n", {"run.toml:2", "an integer"}},
      {"[model]\nlayers = true\n", {"run.toml:2", "an integer"}},
      {"[model]\nlayers = [3]\n", {"run.toml:2", "an integer", "an array"}},
      {"[model.layers]\nx = 3\n", {"run.toml:2: model.layers.x"}},
      {"[train]\nlr = nan\n", {"run.toml:2: train.lr", "a finite number > 0"}},
      {"[train]\nlr = -inf\n", {"run.toml:2: train.lr", "a finite number > 0"}},
      {"[parallel]\nstrategy = 3\n", {"run.toml:2: parallel.strategy", "one of ddp", "got 3"}},
      {"quiet = 1\n", {"run.toml:1: quiet", "true or false", "got 1"}},
      {"data.path = 1979-05-27\n", {"data.path", "expected text"}},
      {"\"model.layers\" = 3\n[model]\nlayers = 4\n", {"model.layers", "second"}},
      {"config = \"other.toml\"\n", {"run.toml:1: config"}},
  };
  for (const auto& [text, parts] : cases) {
    const TempFolder folder;
    const std::string file = "--config=" + folder.write("run.toml", text);
    Program p;
    EXPECT_TRUE(has(p.refusal({file.c_str()}), parts)) << text;
  }
}

TEST(ConfigFile, ThatIsNotTomlOrNotThereIsAnIoError) {
  const TempFolder folder;
  const auto refusal = [&](const std::string& path) {
    const std::string flag = "--config=" + path;
    return error_of<IoError>([&] { Program().parse({flag.c_str()}); });
  };
  EXPECT_TRUE(has(refusal(folder.write("a.toml", "quiet = true\nx = = 3\n")), {"a.toml:2"}));
  EXPECT_TRUE(has(refusal(folder.write("b.toml", "quiet = true\nquiet = true\n")), {"b.toml:2"}));
  EXPECT_TRUE(
      has(refusal(folder.write("c.toml", "train.seed = 99999999999999999999\n")), {"c.toml:1"}));
  EXPECT_TRUE(has(refusal(folder / "none.toml"), {"none.toml", "No such file"}));
  EXPECT_TRUE(has(refusal(folder.path()), {"a folder"}));
}

TEST(ConfigFile, WrittenFromTheValuesInForceReadsBackTheSame) {
  Program p;
  p.parse({"--train.lr=1e-05", "--data.path=a \"b\"\\c\n\xC3\xA9", "--device=cuda",
           "--model.layers=3"});
  const TempFolder folder;
  const std::string file = "--config=" + folder.write("dump.toml", p.flags.to_toml());
  Program q;
  EXPECT_TRUE(q.parse({file.c_str()}));
  EXPECT_EQ(q.flags.to_toml(), p.flags.to_toml());
  EXPECT_EQ(q.lr, 1e-05);
  EXPECT_EQ(q.path, p.path);
  EXPECT_EQ(q.device, Device::kCuda);
}

TEST(Flags, ValuesInForceAreOneJsonObject) {
  Program p;
  p.parse({"--train.lr=0.1", "--quiet"});
  const auto json = nlohmann::json::parse(p.flags.to_json());
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
