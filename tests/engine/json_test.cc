// JSON that comes from elsewhere, and values that we write.
#include "engine/io/json.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <new>
#include <nlohmann/json.hpp>
#include <string>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/failing_new.h"

namespace tessera::engine {
namespace {

using engine::IoError;
using testing::error_of;
using testing::has;

std::string refusal(const std::string& text) {
  const std::string error = error_of<IoError>([&] { parse_json(text, "a.json"); });
  EXPECT_TRUE(has(error, {"a.json"}));
  return error;
}

/// `depth` arrays, one in the other.
std::string nested(int depth) {
  const auto n = static_cast<std::size_t>(depth);
  return std::string(n, '[') + std::string(n, ']');
}

TEST(ParseJson, ReadsWhatIsThere) {
  const auto json = parse_json(R"( {"a": [1, -2.5, "x\u00e9", true, null], "b": {}} )", "a.json");
  EXPECT_EQ(json.at("a"), nlohmann::json({1, -2.5, "x\xC3\xA9", true, nullptr}));
  EXPECT_TRUE(json.at("b").is_object());
}

TEST(ParseJson, AKeyComesOnceInItsObjectAndMayComeInOthers) {
  // Beside each other, inside each other, and again after an inner object has ended.
  const auto json = parse_json(R"({"a": {"x": 1, "y": 2}, "b": [{"x": 3}, {"x": 4}], "x": 5})", "");
  EXPECT_EQ(json.at("b").at(1).at("x"), 4);
  EXPECT_EQ(json.at("x"), 5);
  EXPECT_NO_THROW(parse_json(R"({"a": {"a": {"a": 1}}})", ""));
  for (const char* text : {R"({"x": 1, "x": 1})", R"({"x": 1, "a": {"b": 2}, "x": 3})",
                           R"([{"a": {"x": 1, "c": {}, "x": 2}}])", R"({"x": 1, "\u0078": 2})"}) {
    EXPECT_TRUE(has(refusal(text), {"\"x\" twice"})) << text;
  }
}

TEST(ParseJson, NestsAsDeepAsItSaysAndNoDeeper) {
  EXPECT_NO_THROW(parse_json(nested(16), ""));
  EXPECT_TRUE(has(refusal(nested(17)), {"at most 16 levels"}));
  EXPECT_TRUE(has(refusal(nested(100'000)), {"at most 16 levels"}));
}

// A value's own destructor would end the process.
TEST(ParseJson, GivesBackWhatItMadeWithoutMemory) {
  const std::string text =
      R"({"a long key for which memory is needed": [[1, "a long text, too"], {"b": {"c": []}}], "d": {}})";
  int num_failed = 0;
  for (std::int64_t n = 0;; ++n) {
    testing::fail_new_after(n, testing::Fails::kAll);
    try {
      nlohmann::json value = parse_json(text, "a.json");
      const JsonEnd end(value);
      testing::fail_new_after(0, testing::Fails::kAll);
      break;
    } catch (const std::bad_alloc&) {
      ++num_failed;
    }
    testing::never_fail_new();
  }
  testing::never_fail_new();
  EXPECT_GT(num_failed, 10);
}

TEST(ParseJson, RefusesTextThatIsNotStrictJson) {
  for (const char* text : {"", " ", "{", "{} {}", "[1,]", "{'a': 1}", "01", "NaN", "[1] // one",
                           "\"\xFF\"", "\"\\ud800\"", "1e999"}) {
    EXPECT_TRUE(has(refusal(text), {"expected JSON"})) << text;
  }
  EXPECT_TRUE(has(refusal(std::string("{}\0{}", 5)), {"NUL"}));
}

TEST(JsonLiteral, WholeNumbersStayFloatingPoint) {
  EXPECT_EQ(json_literal(1.0), "1.0");
  EXPECT_EQ(json_literal(-3.0f), "-3.0");
  EXPECT_EQ(json_literal(0.1f), "0.1");
  EXPECT_EQ(json_literal(1e30), "1e+30");
  EXPECT_EQ(json_literal("a\"\n\xFF"), "\"a\\\"\\n\xEF\xBF\xBD\"");
}

}  // namespace
}  // namespace tessera::engine
