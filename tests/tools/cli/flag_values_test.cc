// One value as a flag and in a TOML file; and paths from a person's home.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tools/cli/flags.h"

namespace tessera::tools {
namespace {

using engine::InvalidArgument;
using testing::error_of;
using testing::has;
using testing::TempFolder;

/// What an option of each kind holds after it was given `text`; none: it was refused.
template <class T, class Option>
std::optional<T> value_of(const std::string& argument, Option option) {
  T value{};
  FlagSet flags("test", "");
  flags.add("a", &value, option);
  std::ostringstream out;
  try {
    flags.parse(std::vector<const char*>{argument.c_str()}, out);
  } catch (const engine::Error&) {
    return std::nullopt;
  }
  return value;
}

template <class T, class Option>
void expect_same(const std::string& literal, bool is_value, Option option) {
  const TempFolder folder;
  const std::string config = folder.write("a.toml", "a = " + literal + "\n");
  const auto by_flag = value_of<T>("--a=" + literal, option);
  const auto by_file = value_of<T>("--config=" + config, option);
  EXPECT_EQ(by_flag, by_file) << literal;
  EXPECT_EQ(by_flag.has_value(), is_value) << literal;
}

TEST(FlagValues, NumbersAreTheSameInAFile) {
  for (const char* literal : {"0",
                              "0.0",
                              "-0.0",
                              "1e-5",
                              "1E5",
                              "0.1",
                              "1e308",
                              "1.7976931348623157e308",
                              "2.2250738585072014e-308",
                              "1e-310",
                              "5e-324",
                              "0.30000000000000004",
                              "9007199254740993",
                              "-1",
                              "+1",
                              "+1.5e3",
                              "1_000.000_1",
                              "0x10",
                              "0o17",
                              "0b101",
                              "123456789012345678",
                              "3.0000000000000001",
                              "0e-400"}) {
    expect_same<double>(literal, true, NumberOption{.help = "x"});
  }
  for (const char* literal : {"1e-400", "-1e-400", "1e400", "-1e400", "1e999999", "inf", "-inf",
                              "nan", "1__0", "_1", "0x", "1979-05-27", "true", "\"1\""}) {
    expect_same<double>(literal, false, NumberOption{.help = "x"});
  }
}

TEST(FlagValues, ZeroMayBeAllowedWithARange) {
  const NumberOption option{.help = "x", .min = 0.5, .max = 2, .or_zero = true};
  for (const char* literal : {"0", "0.0", "0.5", "2"}) expect_same<double>(literal, true, option);
  for (const char* literal : {"0.25", "-1", "3"}) expect_same<double>(literal, false, option);
  EXPECT_EQ(value_of<double>("--a=0", NumberOption{.help = "x", .min = 0.5, .max = 2}),
            std::nullopt);
  double value = 0;
  FlagSet flags("test", "");
  flags.add("a", &value, option);
  std::ostringstream out;
  EXPECT_TRUE(has(
      error_of<InvalidArgument>([&] { flags.parse(std::vector<const char*>{"--a=0.25"}, out); }),
      {"expected 0 or a number in [0.5, 2], got \"0.25\""}));
}

TEST(FlagValues, IntegersAreTheSameInAFile) {
  for (const char* literal : {"0", "-0", "+7", "1_000", "0xFF", "0o17", "0b101", "7", "-7",
                              "9223372036854775807", "-9223372036854775808"}) {
    expect_same<std::int64_t>(literal, true, IntegerOption{.help = "x"});
  }
  for (const char* literal : {"9223372036854775808", "1.0", "1e3", "1e-400", "true", "inf"}) {
    expect_same<std::int64_t>(literal, false, IntegerOption{.help = "x"});
  }
  for (const char* literal : {"true", "false"}) {
    expect_same<bool>(literal, true, BoolOption{"x"});
  }
  for (const char* literal : {"1", "0", "1e-400", "0.0"}) {
    expect_same<bool>(literal, false, BoolOption{"x"});
  }
}

class HomePaths : public ::testing::Test {
 protected:
  HomePaths() { EXPECT_EQ(::setenv("HOME", "/home/somebody", 1), 0); }
  ~HomePaths() override { ::unsetenv("BUILD_WORKING_DIRECTORY"); }
};

TEST_F(HomePaths, ATildeIsTheHomeFolder) {
  for (const char* folder : {"", "/elsewhere"}) {
    if (*folder != '\0') ::setenv("BUILD_WORKING_DIRECTORY", folder, 1);
    EXPECT_EQ(resolve_user_path("~"), "/home/somebody");
    EXPECT_EQ(resolve_user_path("~/"), "/home/somebody/");
    EXPECT_EQ(resolve_user_path("~/a/~b"), "/home/somebody/a/~b");
    EXPECT_EQ(resolve_user_path("/a/~"), "/a/~");
  }
  EXPECT_EQ(resolve_user_path("a~"), "/elsewhere/a~");
  EXPECT_EQ(resolve_user_path("./~"), "/elsewhere/./~");
  EXPECT_EQ(with_home("a/b"), "a/b");
  EXPECT_EQ(with_home(""), "");
}

TEST_F(HomePaths, TheHomeOfAnotherIsRefused) {
  EXPECT_TRUE(has(error_of<InvalidArgument>([] { resolve_user_path("~root/x"); }),
                  {"~ or ~/", "got ~root", "./~root", "(~root/x)"}));
  EXPECT_TRUE(has(error_of<InvalidArgument>([] { resolve_user_path("~root"); }), {"got ~root"}));
  ::setenv("HOME", "nowhere", 1);
  EXPECT_TRUE(
      has(error_of<InvalidArgument>([] { resolve_user_path("~/x"); }), {"$HOME", "nowhere"}));
}

TEST_F(HomePaths, WithoutAVariableTheSystemKnowsIt) {
  ::unsetenv("HOME");
  const std::string home = resolve_user_path("~");
  EXPECT_TRUE(home.starts_with('/')) << home;
  EXPECT_NE(home, "/home/somebody");
}

}  // namespace
}  // namespace tessera::tools
