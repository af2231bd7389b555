#include "tools/cli/flags.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/io/text.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"

namespace tessera::tools {
namespace {

using namespace std::literals;
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

TEST(ConfigFile, ErrorsNameFileLineAndKey) {
  const struct {
    const char* text;
    std::initializer_list<std::string_view> parts;
  } cases[] = {
      {"[model]\n\nlayer = 3\n", {"run.toml:3: model.layer", "did you mean model.layers?"}},
      {"[modle]\n", {"run.toml:1: modle"}},
      {"model = 3\n", {"run.toml:1: model"}},
      {"[model]\nlayers = 99\n", {"run.toml:2: model.layers", "an integer in [1, 64]", "got 99"}},
      {"[model]\nlayers = \"3\"\n", {"run.toml:2", "an integer in [1, 64]", "got the string '3'"}},
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

// What --config=FILE says of `text`, whatever kind of error it is; "" if nothing.
std::string file_refusal(Program& program, const TempFolder& folder, std::string_view text) {
  const std::string flag = "--config=" + folder.write("run.toml", text);
  try {
    program.parse({flag.c_str()});
  } catch (const engine::Error& error) {
    return error.what();
  }
  return "";
}
std::string file_refusal(std::string_view text) {
  Program program;
  return file_refusal(program, TempFolder(), text);
}

std::string repeated(std::string_view text, std::size_t n) {
  std::string result;
  for (; n > 0; --n) result += text;
  return result;
}

TEST(ConfigFile, EmptyTablesOfKnownSectionsAreFine) {
  EXPECT_EQ(file_refusal("[train]\n[model]\nlayers = 3\n[parallel]\n"), "");
  EXPECT_EQ(file_refusal("train = {}\n"), "");
  EXPECT_TRUE(has(file_refusal("[train]\n[trian]\n"), {"run.toml:2: trian", "got trian"}));
  EXPECT_TRUE(has(file_refusal("[train.more]\n"), {"run.toml:1: train.more", "known option"}));
  EXPECT_TRUE(has(file_refusal("[model.layers]\n"), {"run.toml:1: model.layers", "a table"}));
}

TEST(ConfigFile, ValuesOfOtherKindsAreNamedWithTheirLine) {
  const struct {
    const char* text;
    std::initializer_list<std::string_view> parts;
  } cases[] = {
      {"\n[[train]]\nlr = 1\n",
       {"a table of options", "got an array of tables", "run.toml:2: train"}},
      {"\ntrain = 3\n", {"a table of options", "got 3", "run.toml:2: train"}},
      {"train = []\n", {"a table of options", "got an array", "run.toml:1: train"}},
      {"[data]\npath = 1979-05-27T07:32:00Z\n",
       {"expected text", "got 1979-05-27T07:32:00Z", "run.toml:2: data.path"}},
      {"[data]\npath = 07:32:00\n", {"expected text", "got 07:32:00", "run.toml:2"}},
      {"[data]\npath = [\"a\"]\n", {"expected text", "got an array", "run.toml:2"}},
      {"[data]\npath = {x = 1}\n", {"known option", "got data.path.x", "run.toml:2"}},
      {"[data]\npath = nan\n", {"expected text", "got nan", "run.toml:2: data.path"}},
      {"[model]\nlayers = inf\n", {"an integer in [1, 64]", "got inf", "run.toml:2"}},
      {"[model]\nlayers = 1979-05-27\n", {"an integer", "got 1979-05-27", "run.toml:2"}},
  };
  for (const auto& [text, parts] : cases) EXPECT_TRUE(has(file_refusal(text), parts)) << text;
}

// A parser that recursed over any of these, or took their square in time, would not come back.
TEST(ConfigFile, ThatIsDeepOrLongIsRefused) {
  const std::size_t n = 100'000;
  const std::string deep = repeated("a.", n) + "a";
  for (const std::string& text :
       {deep + " = 1\n", "[" + deep + "]\n", "[[" + deep + "]]\n", "x = {" + deep + " = 1}\n",
        repeated("\"\".", n) + "a = 1\n", repeated("a . ", n) + "a = 1\n",
        "# comment\nx = \"\"\"\"\"\"\n" + deep + " = 1\n", "x = '''a'''''\n" + deep + " = 1\n",
        "x = '''a''''\n" + deep, "x = \"\\\"\"\n" + deep, "x = '\\'\n" + deep}) {
    EXPECT_TRUE(has(file_refusal(text), {"at most 16 parts of a name", "run.toml:"}))
        << text.substr(0, 30);
  }
  for (const std::string_view open : {"[", "{a=", "[{a="}) {
    EXPECT_TRUE(has(file_refusal("x = " + repeated(open, n)),
                    {"at most 16 levels of brackets", "run.toml:1"}));
  }
  std::string tables;
  for (std::size_t i = 0; i < n; ++i) tables.append("[").append(std::to_string(i)).append("]\n");
  EXPECT_TRUE(has(file_refusal(tables), {"at most 4096 keys, tables and elements"}));
  for (const std::string_view header : {"[.a]", "[[ =]]", "[\n]", "[ #"}) {
    EXPECT_TRUE(has(file_refusal(std::string("# [.a] and ['\n").append(header)),
                    {"expected a name after [, got none (", "run.toml:2)"}));
  }
  const std::string key(1'000'000, 'k');
  const std::string refusal = file_refusal(key + " = 1\n");
  EXPECT_TRUE(has(refusal, {"expected a known option, got kkk", "(1000000 bytes)", "run.toml:1"}));
  EXPECT_LT(refusal.size(), 1000u);
  EXPECT_LT(file_refusal("[model]\nlayers = '" + key + "'\n").size(), 1000u);
  EXPECT_LT(file_refusal("x = [ " + key).size(), 1000u);
}

TEST(ConfigFile, IsRefusedFromTheFirstThatIsTooMany) {
  const auto is_beyond = [](const std::string& text) {
    return file_refusal(text).find("expected at most ") != std::string::npos;
  };
  const auto parts = [](std::size_t n) { return repeated("a.", n - 1) + "a = 1\n"; };
  EXPECT_FALSE(is_beyond(parts(16) + parts(16)));
  EXPECT_TRUE(is_beyond(parts(17)));
  const auto levels = [](std::size_t n) { return "x = " + repeated("[", n) + repeated("]", n); };
  EXPECT_FALSE(is_beyond(levels(16)));
  EXPECT_TRUE(is_beyond(levels(17)));
  EXPECT_FALSE(is_beyond(repeated("x = [{}, {}]\n", 20))) << "one behind the other";
  // The = and the [ count as well.
  const auto items = [](std::size_t n) { return "x = [1" + repeated(",1", n - 2) + "]\n"; };
  EXPECT_FALSE(is_beyond(items(4096)));
  EXPECT_TRUE(is_beyond(items(4097)));
}

TEST(ConfigFile, HeadersNeedANameBehindValuesToo) {
  for (const std::string_view value : {"x = 1\n", "x = 1  # comment\n", "x = '\\'\n"}) {
    EXPECT_TRUE(has(file_refusal(std::string(value) + "[.a]\n"),
                    {"expected a name after [, got none (", "run.toml:2)"}))
        << value;
  }
}

TEST(ConfigFile, MayHaveDotsAndBracketsInStringsAndComments) {
  const TempFolder folder;
  const std::string dots = repeated("../", 1300).append("[{a.b,=[{a.b,=");  // a long path
  for (const std::string quotes : {"\"", "'", "\"\"\"", "'''"}) {
    Program p;
    EXPECT_EQ(file_refusal(p, folder,
                           "# " + dots + repeated("[", 100) + " \" '''\n\"data\".path = " + quotes +
                               dots + quotes + " # " + dots + "\n[train]\nlr = 1.5\n"),
              "");
    EXPECT_EQ(p.path, dots);
    EXPECT_EQ(p.lr, 1.5);
  }
  Program p;
  EXPECT_EQ(
      file_refusal(p, folder, "data.path = \"\"\"\\\"\"\"\\\"" + dots + "\"\"\"\"\" # " + dots),
      "");
  EXPECT_EQ(p.path, "\"\"\"\"" + dots + "\"\"");
}

TEST(ConfigFile, MutatedIsReadOrRefusedInOneLine) {
  const std::string valid =
      "# a run\nquiet = true\ndevice = 'cuda'\n[parallel]\nstrategy = \"zero1\"\n[model]\n"
      "layers = 8\ndropout = 0.25\n[train]\nlr = 1e-3\nseed = 7\n[data]\npath = \"a\\u00e9/b\"\n";
  const std::string_view parts[] = {
      ".",    "a.",   "[",    "]",      "[[", "]]",    "{",  "}",     "=",       ",",
      "\"",   "'",    "'''",  "\"\"\"", "\n", "#",     "\r", "\\",    "\\u0000", "\\ud800",
      "nan",  "inf",  "-",    "_",      "1",  "e",     "0x", ":",     "true",    "1979-05-2",
      "\xFF", "\0"sv, "\x1B", "\x7F",   " ",  "train", "lr", "x=1\n", "\xC2\x9B"};
  std::mt19937 random(7);
  const auto below = [&](std::size_t n) { return random() % n; };
  const TempFolder folder;
  int num_read = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string text = valid;
    for (auto edits = 1 + below(6); edits > 0; --edits) {
      const std::size_t at = below(text.size() + 1);
      switch (below(3)) {
        case 0:
          text.erase(at, below(9));
          break;
        case 1:
          text.insert(at, text.substr(below(text.size() + 1), below(40)));
          break;
        default:
          text.insert(at,
                      repeated(parts[below(std::size(parts))], below(4) == 0 ? below(3000) : 1));
      }
    }
    Program p;
    const std::string refusal = file_refusal(p, folder, text);
    num_read += refusal.empty() ? 1 : 0;
    EXPECT_LT(refusal.size(), 1000u);
    EXPECT_EQ(engine::escaped(refusal), refusal) << text;
  }
  EXPECT_GT(num_read, 30);
  EXPECT_LT(num_read, 2900);
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

// Sets data.path; if it was taken, the file of the values in force must read back as the same.
::testing::AssertionResult is_kept_or_refused(const std::string& path, bool& taken) {
  Program p;
  taken = true;
  try {
    const std::string flag = "--data.path=" + path;
    p.parse({flag.c_str()});
  } catch (const InvalidArgument&) {
    taken = false;
    return ::testing::AssertionSuccess();
  }
  Program q;
  const std::string refusal = file_refusal(q, TempFolder(), p.flags.to_toml());
  if (!refusal.empty())
    return ::testing::AssertionFailure() << engine::escaped(path) << ": " << refusal;
  if (q.path != path || q.flags.to_toml() != p.flags.to_toml()) {
    return ::testing::AssertionFailure()
           << engine::escaped(path) << " became " << engine::escaped(q.path);
  }
  return ::testing::AssertionSuccess();
}

TEST(ConfigFile, TextOfAnyCharactersReadsBackTheSame) {
  std::string path;
  for (std::uint32_t c = 1; c <= 0x10FFFF; ++c) {
    if (c == 0xD800) c = 0xE000;
    const auto tail = [&](int shift) { return static_cast<char>(0x80 | (c >> shift & 0x3F)); };
    if (c < 0x80) {
      path += static_cast<char>(c);
    } else if (c < 0x800) {
      path += {static_cast<char>(0xC0 | c >> 6), tail(0)};
    } else if (c < 0x10000) {
      path += {static_cast<char>(0xE0 | c >> 12), tail(6), tail(0)};
    } else {
      path += {static_cast<char>(0xF0 | c >> 18), tail(12), tail(6), tail(0)};
    }
    if (path.size() < 8000 && c != 0x10FFFF) continue;
    bool taken = false;
    ASSERT_TRUE(is_kept_or_refused(path, taken)) << "up to U+" << std::hex << c;
    EXPECT_TRUE(taken);
    path.clear();
  }
}

TEST(ConfigFile, TextOfAnyBytesReadsBackTheSameOrIsRefused) {
  std::mt19937 random(7);
  bool taken = false;
  int num_taken = 0;
  for (int i = 0; i < 2000; ++i) {
    std::string path;
    for (auto length = random() % 8; length > 0; --length) {
      // Any byte now and then, so that about half of the texts are UTF-8.
      path += static_cast<char>(1 + random() % (random() % 4 == 0 ? 255 : 127));
      if (random() % 4 == 0) path += "\xC2\x85";
    }
    EXPECT_TRUE(is_kept_or_refused(path, taken));
    num_taken += taken ? 1 : 0;
  }
  EXPECT_GT(num_taken, 500);
  EXPECT_LT(num_taken, 1900);
  EXPECT_TRUE(is_kept_or_refused(std::string(8192, '\x01'), taken));
  EXPECT_TRUE(taken);
  EXPECT_TRUE(is_kept_or_refused(std::string(8193, 'a'), taken));
  EXPECT_FALSE(taken);
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
