#include "tools/io/jsonl.h"
#include "tests/testing/json.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using testing::error_of;
using testing::has;
using testing::TempFolder;

TEST(Jsonl, WritesALineARecordThatIsThereAtOnce) {
  const TempFolder folder;
  JsonlWriter log(folder / "a.jsonl");
  log.write(JsonRecord().add("step", 1).add("loss", 2.5).add("ok", true).add("name", "x\"\n"));
  EXPECT_EQ(folder.read("a.jsonl"),
            "{\"step\":1,\"loss\":2.5,\"ok\":true,\"name\":\"x\\\"\\n\"}\n");
  log.write(JsonRecord().add_literal("more", JsonRecord().add("a", -1).text()));
  EXPECT_TRUE(has(folder.read("a.jsonl"), {"}\n{\"more\":{\"a\":-1}}\n"}));
}

TEST(Jsonl, APipeThatNobodyReadsIsNotWaitedForForEver) {
  const TempFolder folder;
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  for (const auto mode : {JsonlWriter::Mode::kReplace, JsonlWriter::Mode::kReplaceLater}) {
    EXPECT_EQ(error_of<IoError>(
                  [&] { JsonlWriter(folder / "pipe", mode, std::chrono::milliseconds(50)); }),
              "[jsonl] expected a reader of the pipe, got none (" + folder / "pipe" + ")");
  }
}

TEST(Jsonl, NumbersReadBackTheSame) {
  const double doubles[] = {0.1,  1.0 / 3,    1e-300, 5e-324, 1.7976931348623157e308,
                            -0.0, 123456789.0};
  for (const double value : doubles) {
    const auto json = testing::parse_json(JsonRecord().add("x", value).text());
    const auto back = json.at("x").get<double>();
    EXPECT_EQ(std::memcmp(&back, &value, sizeof value), 0) << value;
  }
  EXPECT_EQ(JsonRecord().add("x", 0.1).text(), "{\"x\":0.1}");
  EXPECT_EQ(JsonRecord().add("x", 0.1f).text(), "{\"x\":0.1}");
  EXPECT_EQ(JsonRecord().add("x", ~std::uint64_t{0}).text(), "{\"x\":18446744073709551615}");
}

TEST(Jsonl, WhatJsonCannotExpressIsNullOrReplaced) {
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(JsonRecord().add("x", std::nan("")).add("y", -infinity).text(),
            "{\"x\":null,\"y\":null}");
  EXPECT_EQ(JsonRecord().add("x", "\xFF").text(), "{\"x\":\"\xEF\xBF\xBD\"}");
}

TEST(Jsonl, ControlCharactersAreEscapedAsTomlNeedsIt) {
  EXPECT_EQ(JsonRecord().add("x", "\x7F\x01\n\xC2\x80").text(),
            "{\"x\":\"\\u007f\\u0001\\n\xC2\x80\"}");
}

TEST(Json, ErrorsAreShortAndCannotCommandATerminal) {
  const auto refusal = [](const std::string& text) {
    return error_of<IoError>([&] { engine::parse_json(text, "a.json"); });
  };
  EXPECT_TRUE(
      has(refusal(R"({"a\u0000\u001b":1,"a\u0000\u001b":2})"), {"\"a\\x00\\x1b\" twice (a.json)"}));
  EXPECT_TRUE(has(refusal("{\"\xC2\x9B\" x"), {"\\u009b", "(a.json)"}));
  const std::string refused = refusal("\"" + std::string(100'000, 'x'));
  EXPECT_TRUE(has(refused, {"(a.json)"}));
  EXPECT_LT(refused.size(), 600u);
}

TEST(Jsonl, ReplacesOrAppends) {
  const TempFolder folder;
  const std::string path = folder.write("a.jsonl", "old\n");
  JsonlWriter(path, JsonlWriter::Mode::kAppend).write(JsonRecord().add("a", 1));
  EXPECT_EQ(folder.read("a.jsonl"), "old\n{\"a\":1}\n");
  JsonlWriter(path).write(JsonRecord());
  EXPECT_EQ(folder.read("a.jsonl"), "{}\n");
}

// A run goes on after the records that are kept, and a write that was cut short leaves half a one,
// or all of one but its end of line.
TEST(Jsonl, KeepsTheFirstWholeRecordsThatAreAskedFor) {
  const TempFolder folder;
  const auto kept = [&](const std::string& text, int last) {
    JsonlWriter log(folder.write("a.jsonl", text), JsonlWriter::Mode::kReplaceLater);
    EXPECT_EQ(folder.read("a.jsonl"), text);
    log.keep_while([&](const nlohmann::json& record) { return record.at("step") <= last; });
    log.write(JsonRecord().add("next", true));
    return folder.read("a.jsonl");
  };
  const std::string one = "{\"step\":1}\n", two = "{\"step\":2}\n", next = "{\"next\":true}\n";
  EXPECT_EQ(kept("", 9), next);
  EXPECT_EQ(kept(one + two + one, 0), next);
  EXPECT_EQ(kept(one + two + one, 1), one + next);
  EXPECT_EQ(kept(one + two, 9), one + two + next);
  EXPECT_EQ(kept(one + "{\"step\":2}", 9), one + next);
  EXPECT_EQ(kept(one + "{\"st", 9), one + next);
  EXPECT_EQ(kept(one + "{\"st\n" + two, 9), one + next);
}

TEST(Jsonl, FailuresNameThePathAndTheReason) {
  const TempFolder folder;
  EXPECT_TRUE(has(error_of<IoError>([&] { JsonlWriter(folder / "no/a.jsonl"); }),
                  {"no/a.jsonl", "No such file"}));
  JsonlWriter full("/dev/full");
  EXPECT_TRUE(has(error_of<IoError>([&] { full.write(JsonRecord().add("a", 1)); }),
                  {"/dev/full", "No space left"}));
}

}  // namespace
}  // namespace tessera::tools
