// The file of --config: what it may say, what is refused of it, and that what is written reads
// back.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <string>
#include <string_view>

#include "engine/error.h"
#include "engine/io/text.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/cli/every_option.h"

namespace tessera::tools {
namespace {

using namespace std::literals;
using engine::InvalidArgument;
using engine::IoError;
using testing::error_of;
using testing::has;
using testing::TempFolder;

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

TEST(ConfigFile, OfAnotherKindIsToldByIt) {
  const TempFolder folder;
  const auto refusal = [&](const std::string& text) {
    const std::string flag = "--config=" + folder.write("a.toml", text);
    return error_of<IoError>([&] { Program().parse({flag.c_str()}); });
  };
  EXPECT_TRUE(has(refusal("\n<!DOCTYPE html>\n<html>"),
                  {"expected TOML, got an HTML page: download the file itself", "a.toml"}));
  EXPECT_TRUE(
      has(refusal("{\"quiet\": true}\n"),
          {"expected TOML, got JSON: the config.toml of a run shows how options", "a.toml"}));
  EXPECT_TRUE(has(refusal("\x1f\x8b\x08 packed"), {"expected TOML, got a gzip file: unpack it"}));
  EXPECT_TRUE(has(refusal("%PDF-1.7"), {"expected TOML, got a PDF file ("}));
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
  EXPECT_FALSE(is_beyond(repeated("x = [{}, {}]\n", 20))) << "one after the other";
  // The = and the [ count as well.
  const auto items = [](std::size_t n) { return "x = [1" + repeated(",1", n - 2) + "]\n"; };
  EXPECT_FALSE(is_beyond(items(4096)));
  EXPECT_TRUE(is_beyond(items(4097)));
}

TEST(ConfigFile, HeadersNeedANameAfterValuesToo) {
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

}  // namespace
}  // namespace tessera::tools
