#include "engine/io/safetensors.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"

namespace tessera::engine {
namespace {

using engine::InvalidArgument;
using engine::IoError;
using std::string_literals::operator""s;  // NOLINT(misc-unused-using-decls)
using testing::error_of;
using testing::has;
using testing::TempFolder;

std::string length_of(std::uint64_t n) { return {reinterpret_cast<const char*>(&n), sizeof n}; }

/// A file with this header, as it stands, and `nbytes` bytes of tensors.
std::string file_of(std::string_view json, std::size_t nbytes) {
  return length_of(json.size()) + std::string(json) + std::string(nbytes, '\1');
}

/// One entry of a header.
std::string entry(std::string_view name, std::string_view dtype, std::string_view shape,
                  std::string_view offsets) {
  return fmt::format(R"("{}":{{"dtype":"{}","shape":{},"data_offsets":{}}})", name, dtype, shape,
                     offsets);
}

/// The error of a file with these bytes, which must name the file.
std::string refusal(const std::string& bytes) {
  const TempFolder folder;
  const std::string path = folder.write("bad.safetensors", bytes);
  const std::string error = error_of<IoError>([&] { SafetensorsFile{path}; });
  EXPECT_TRUE(has(error, {"bad.safetensors"}));
  return error;
}

std::string refusal_of_header(const std::string& json, std::size_t nbytes = 0) {
  return refusal(file_of(json, nbytes));
}

/// A file of several tensors, as a writer of another hand would make it.
std::string small_file() {
  return file_of("{\"__metadata__\":{\"format\":\"pt\"}," + entry("a", "F32", "[2,2]", "[0,16]") +
                     "," + entry("empty", "F32", "[0,3]", "[16,16]") + "," +
                     entry("b.\\u00e9", "BF16", "[]", "[16,18]") + "," +
                     entry("c", "F16", "[3]", "[18,24]") + "," +
                     entry("d", "I64", "[1]", "[24,32]") + "}  ",
                 32);
}

TEST(SafetensorsFile, ReadsWhatOthersWrite) {
  const TempFolder folder;
  const SafetensorsFile file(folder.write("a.safetensors", small_file()));
  ASSERT_EQ(file.tensors().size(), 5u);
  EXPECT_EQ(file.metadata().at("format"), "pt");
  const TensorInfo* a = file.find("a");
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(a->shape, (std::vector<std::int64_t>{2, 2}));
  EXPECT_EQ(a->dtype, "F32");
  EXPECT_NE(file.find("b.\xC3\xA9"), nullptr);
  EXPECT_EQ(file.find("none"), nullptr);
  std::vector<float> values(4);
  file.read(*a, 0, values);
  float expected = 0;
  std::memset(&expected, 1, sizeof expected);
  EXPECT_EQ(values, std::vector<float>(4, expected));
  EXPECT_TRUE(
      has(error_of<InvalidArgument>([&] { file.read(*a, 1, values); }), {"(2, 2)", "\"a\""}));
  EXPECT_TRUE(
      has(error_of<IoError>([&] { file.read(*file.find("d"), 0, std::span(values).first(1)); }),
          {"F32, BF16 or F16", "I64", "\"d\"", "a.safetensors"}));
}

TEST(SafetensorsFile, TakesEmptyTensorsWhereverTheyLie) {
  const TempFolder folder;
  const std::string full = entry("full", "F32", "[1]", "[0,4]");
  const std::string last = entry("last", "U8", "[2]", "[4,6]");
  const auto none = [](const char* name, const char* shape, const char* offsets) {
    return entry(name, "F32", shape, offsets);
  };
  const std::string first = none("first", "[0]", "[0,0]"),
                    middle = none("middle", "[3,0]", "[4,4]"),
                    other = none("other", "[0,1099511627776]", "[4,4]"),
                    behind = none("behind", "[2,0,5]", "[6,6]");
  // Before, between and after the others, which may be listed first.
  for (const auto& list :
       std::vector<std::vector<std::string>>{{full, last, first},
                                             {first, full, last},
                                             {full, last, middle},
                                             {full, middle, last},
                                             {other, last, middle, full},
                                             {full, last, behind},
                                             {last, behind, other, middle, full, first}}) {
    std::string json;
    for (const std::string& text : list) json += (json.empty() ? "{" : ",") + text;
    const SafetensorsFile file(folder.write("a.safetensors", file_of(json + "}", 6)));
    EXPECT_EQ(file.tensors().size(), list.size()) << json;
    std::vector<float> value(1);
    file.read(*file.find("full"), 0, value);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(value[0]), 0x01010101u) << json;
  }
  const SafetensorsFile file(
      folder.write("b.safetensors", file_of("{" + none("a", "[0]", "[0,0]") + "}", 0)));
  EXPECT_EQ(file.find("a")->shape, std::vector<std::int64_t>{0});
  EXPECT_NO_THROW(file.read(*file.find("a"), 0, {}));
  // More than a sort of few elements would leave in order by chance.
  std::string many = "{";
  for (int i = 0; i < 100; ++i) {
    const int begin = (i * 37 % 100) / 2, end = begin + i * 37 % 2;
    many += entry(std::to_string(i), "U8", end > begin ? "[1]" : "[0]",
                  fmt::format("[{},{}]", begin, end)) +
            ",";
  }
  many.back() = '}';
  EXPECT_EQ(SafetensorsFile(folder.write("c.safetensors", file_of(many, 50))).tensors().size(),
            100u);
  // Empty is what the shape says, not the offsets.
  EXPECT_TRUE(has(refusal_of_header("{" + none("a", "[0]", "[0,4]") + "}", 4), {"0 bytes"}));
  EXPECT_TRUE(has(refusal_of_header("{" + none("a", "[1]", "[0,0]") + "}", 0), {"4 bytes"}));
  EXPECT_TRUE(has(refusal_of_header("{" + full + "," + none("a", "[0]", "[2,2]") + "}", 4),
                  {"byte 4, got byte 2", "\"a\""}));
}

TEST(SafetensorsFile, ReadsPartsOfTensorsLongerThanAStagingBuffer) {
  constexpr std::int64_t kNumel = 150'000;
  std::vector<std::uint16_t> raw(2 * kNumel);
  for (std::size_t i = 0; i < raw.size(); ++i) raw[i] = static_cast<std::uint16_t>(i * 7 % 30'000);
  const std::string bytes(reinterpret_cast<const char*>(raw.data()), raw.size() * 2);
  const std::string json = "{"s + entry("b", "BF16", "[150000]", "[0,300000]") + "," +
                           entry("h", "F16", "[150000]", "[300000,600000]") + "}";
  const TempFolder folder;
  const SafetensorsFile file(folder.write("a.safetensors", length_of(json.size()) + json + bytes));
  for (const std::int64_t first : {0, 1, 70'001}) {
    std::vector<float> bfloat(static_cast<std::size_t>(kNumel - first)), half(bfloat.size());
    file.read(*file.find("b"), first, bfloat);
    file.read(*file.find("h"), first, half);
    for (std::size_t i = 0; i < bfloat.size(); ++i) {
      const std::size_t at = i + static_cast<std::size_t>(first);
      ASSERT_EQ(std::bit_cast<std::uint32_t>(bfloat[i]), std::uint32_t{raw[at]} << 16) << at;
      const std::uint32_t bits = raw[at + kNumel], exponent = bits >> 10, fraction = bits & 1023;
      ASSERT_EQ(half[i], exponent == 0 ? std::ldexp(fraction, -24)
                                       : std::ldexp(1024 + fraction, int(exponent) - 25))
          << at;
    }
  }
}

TEST(SafetensorsFile, ConvertsEveryHalfAndBfloat16Exactly) {
  const TempFolder folder;
  std::vector<std::uint16_t> all(1 << 16);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  const std::string bytes(reinterpret_cast<const char*>(all.data()), all.size() * 2);
  const std::string json = "{"s + entry("h", "F16", "[65536]", "[0,131072]") + "," +
                           entry("b", "BF16", "[65536]", "[131072,262144]") + "}";
  const SafetensorsFile file(
      folder.write("a.safetensors", length_of(json.size()) + json + bytes + bytes));
  std::vector<float> half(1 << 16), bfloat(1 << 16);
  file.read(*file.find("h"), 0, half);
  file.read(*file.find("b"), 0, bfloat);
  for (std::uint32_t i = 0; i < 1 << 16; ++i) {
    EXPECT_EQ(std::bit_cast<std::uint32_t>(bfloat[i]), i << 16);
    const std::uint32_t exponent = i >> 10 & 31, fraction = i & 1023;
    double value = exponent == 0 ? std::ldexp(fraction, -24)
                                 : std::ldexp(1024 + fraction, static_cast<int>(exponent) - 25);
    if (exponent == 31)
      value = fraction == 0 ? std::numeric_limits<double>::infinity() : std::nan("");
    if (i >> 15 != 0) value = -value;
    ASSERT_TRUE(std::isnan(value) ? std::isnan(half[i]) : static_cast<double>(half[i]) == value)
        << i;
    ASSERT_TRUE(std::isnan(value) || std::signbit(half[i]) == std::signbit(value)) << i;
  }
  std::vector<float> part(3);
  file.read(*file.find("h"), 15361, part);
  EXPECT_EQ(part, std::vector(half.begin() + 15361, half.begin() + 15364));
}

// The corpus of malicious files: the header's length.
TEST(SafetensorsFile, RefusesAHeaderLengthThatCannotBe) {
  for (std::size_t n = 0; n < 8; ++n) EXPECT_TRUE(has(refusal(std::string(n, '\0')), {"8 bytes"}));
  const std::string body(40, ' ');
  for (const std::uint64_t n :
       {~std::uint64_t{0}, std::uint64_t{1} << 63, ~std::uint64_t{7}, std::uint64_t{100'000'001},
        std::uint64_t{48}, std::uint64_t{41}, std::uint64_t{0}, std::uint64_t{1}}) {
    EXPECT_TRUE(has(refusal(length_of(n) + body), {"header of 2 to 40 bytes"})) << n;
  }
  EXPECT_TRUE(has(refusal(length_of(1) + "{"), {"2 to 1"}));
  EXPECT_TRUE(has(refusal(length_of(2) + "{}x"), {"0 bytes of tensors, got 1"}));
  const TempFolder folder;
  const SafetensorsFile empty(folder.write("empty.safetensors", length_of(2) + "{}"));
  EXPECT_TRUE(empty.tensors().empty());
  // The length of a valid header, its bytes in the other order.
  const std::string sound = small_file();
  EXPECT_TRUE(
      has(refusal(std::string(sound.rend() - 8, sound.rend()) + sound.substr(8)), {"header of 2"}));
}

TEST(SafetensorsFile, RefusesAHeaderAboveTheLimitThoughTheFileHoldsIt) {
  const TempFolder folder;
  const std::string path = folder.write("long.safetensors", length_of(100'000'001) + "{");
  std::filesystem::resize_file(path, 100'000'100);
  EXPECT_TRUE(
      has(error_of<IoError>([&] { SafetensorsFile{path}; }), {"2 to 100000000", "100000001"}));
}

// The header's text.
TEST(SafetensorsFile, RefusesTextThatIsNotStrictJson) {
  const std::string ok = entry("a", "F32", "[]", "[0,4]");
  for (const std::string& name :
       {std::string("\xFF"), std::string("\xC0\xAF"),  // overlong
        std::string("\xED\xA0\x80"), std::string("\\ud800"), std::string("\xF4\x90\x80\x80"),
        std::string("a\nb"), std::string("a\\x")}) {
    EXPECT_TRUE(has(refusal_of_header("{"s + entry(name, "F32", "[]", "[0,4]") + "}", 4), {"JSON"}))
        << name;
  }
  EXPECT_TRUE(
      has(refusal_of_header("{"s + entry("a\\u0000b", "F32", "[]", "[0,4]") + "}", 4), {"NUL"}));
  EXPECT_TRUE(has(refusal_of_header("{"s + ok + "}" + std::string(1, '\0') + "}", 4), {"NUL"}));
  for (const std::string& json : {" {"s + ok + "}", "\xEF\xBB\xBF{"s + ok + "}", "["s + ok + "]",
                                  std::string("12"), std::string("\"a\""), "{"s + ok + "}\n",
                                  "{"s + ok + "}x", std::string("null"), std::string("    ")}) {
    EXPECT_TRUE(has(refusal_of_header(json, 4), {"from '{' to '}'"})) << json;
  }
  for (const std::string& json :
       {"{"s + ok + "}}", "{"s + ok + "} {}", "{"s + ok + ",}", "{"s + ok + "/**/}",
        "{"s + ok.substr(0, 12) + "}", std::string("{'a':{}}"), std::string("{a:{}}"),
        std::string("{,}"), std::string("{\"a\"}")}) {
    EXPECT_TRUE(has(refusal_of_header(json, 4), {"JSON header"})) << json;
  }
  const std::string deep(10'000, '['), objects = [] {
    std::string text;
    for (int i = 0; i < 10'000; ++i) text += "{\"a\":";
    return text;
  }();
  EXPECT_TRUE(
      has(refusal_of_header("{\"__metadata__\":" + deep + "}"), {"an object, got an array"}));
  EXPECT_TRUE(has(refusal_of_header("{\"__metadata__\":{\"a\":" + objects + "}"), {"an object"}));
  EXPECT_TRUE(has(refusal_of_header("{\"a\":{\"shape\":" + deep + "}"), {"got an array", "\"a\""}));
  EXPECT_TRUE(has(refusal_of_header(objects + "}"), {"\"a\""}));
}

TEST(SafetensorsFile, RefusesAKeyThatComesTwiceAtAnyLevel) {
  const std::string a = entry("a", "F32", "[]", "[0,4]");
  EXPECT_TRUE(has(refusal_of_header("{"s + a + "," + a + "}", 4), {"once", "\"a\""}));
  const std::string none = entry("a", "F32", "[0]", "[0,0]");
  EXPECT_TRUE(has(refusal_of_header("{"s + none + "," + none + "}"), {"once", "\"a\""}));
  EXPECT_TRUE(
      has(refusal_of_header("{"s + a + "," + entry("\\u0061", "F32", "[]", "[4,8]") + "}", 8),
          {"once", "\"a\""}));
  EXPECT_TRUE(has(refusal_of_header(R"({"__metadata__":{},"__metadata__":{}})"), {"a second"}));
  EXPECT_TRUE(has(refusal_of_header(R"({"__metadata__":{"x":"1","x":"1"}})"), {"\"x\" twice"}));
  for (const char* twice : {R"("dtype":"F32")", R"("shape":[])", R"("data_offsets":[0,4])"}) {
    const std::string json = "{"s + a.substr(0, a.size() - 1) + "," + twice + "}}";
    EXPECT_TRUE(has(refusal_of_header(json, 4), {"twice", "\"a\""})) << json;
  }
}

TEST(SafetensorsFile, RefusesEntriesWithOtherFields) {
  for (const char* fields :
       {R"("shape":[],"data_offsets":[0,4])", R"("dtype":"F32","data_offsets":[0,4])",
        R"("dtype":"F32","shape":[])", "", R"("dtype":"F32","shape":[],"data_offsets":[0,4],"x":1)",
        R"("dtype":5,"shape":[],"data_offsets":[0,4])",
        R"("dtype":["F32"],"shape":[],"data_offsets":[0,4])",
        R"("dtype":null,"shape":[],"data_offsets":[0,4])",
        R"("dtype":"F32","shape":"[]","data_offsets":[0,4])",
        R"("dtype":"F32","shape":{},"data_offsets":[0,4])",
        R"("dtype":"F32","shape":4,"data_offsets":[0,4])"}) {
    EXPECT_TRUE(has(refusal_of_header(fmt::format(R"({{"the name":{{{}}}}})", fields), 4),
                    {"\"the name\""}))
        << fields;
  }
  for (const char* dtype : {"f32", "F4", "F8_E8M0", "float", "", "F32 ", "F6_E2M3"}) {
    EXPECT_TRUE(has(refusal_of_header("{"s + entry("a", dtype, "[]", "[0,4]") + "}", 4),
                    {"known dtype", "\"a\"", fmt::format("\"{}\"", dtype)}));
  }
  for (const char* json :
       {R"({"a":3})", R"({"a":"F32"})", R"({"a":null})", R"({"a":[]})",
        R"({"__metadata__":{"a":1}})", R"({"__metadata__":"a"})", R"({"__metadata__":{"a":null}})",
        R"({"__metadata__":{"a":{}}})", R"({"__metadata__":{"a":[]}})"}) {
    EXPECT_TRUE(has(refusal_of_header(json), {"bad.safetensors"})) << json;
  }
}

TEST(SafetensorsFile, RefusesShapesThatAreNotPlainOrOverflow) {
  for (const char* shape : {"[-1]", "[-0]", "[1.0]", "[1e3]", "[\"1\"]", "[9223372036854775808]",
                            "[18446744073709551616]", "[true]", "[null]", "[[1]]"}) {
    EXPECT_TRUE(
        has(refusal_of_header("{"s + entry("a", "F32", shape, "[0,4]") + "}", 4), {"\"a\""}))
        << shape;
  }
  for (const char* shape :
       {"[4294967296,4294967296]", "[65536,65536,65536,65536]", "[0,9223372036854775807,3]",
        "[9223372036854775807,2,0]", "[4611686018427387904]", "[2305843009213693952]"}) {
    EXPECT_TRUE(
        has(refusal_of_header("{"s + entry("a", "F32", shape, "[0,0]") + "}"), {"2^63", "\"a\""}))
        << shape;
  }
  std::string ones = "[1";
  for (int i = 0; i < 64; ++i) ones += ",1";
  EXPECT_TRUE(has(refusal_of_header("{"s + entry("a", "F32", ones + "]", "[0,4]") + "}", 4),
                  {"more than 64"}));
}

TEST(SafetensorsFile, RefusesOffsetsThatDoNotTileTheFile) {
  for (const char* offsets :
       {"[4,0]", "[-4,0]", "[0]", "[0,4,4]", "[]", "[0,5]", "[0,3]", "[0,12]", "[1,5]",
        "[0,18446744073709551615]", "[9223372036854775804,9223372036854775807]", "[0.0,4]"}) {
    EXPECT_TRUE(
        has(refusal_of_header("{"s + entry("a", "F32", "[1]", offsets) + "}", 4), {"\"a\""}))
        << offsets;
  }
  const auto two = [](const char* first, const char* second, std::size_t nbytes) {
    return refusal_of_header(
        "{"s + entry("a", "U8", "[4]", first) + "," + entry("b", "U8", "[4]", second) + "}",
        nbytes);
  };
  EXPECT_TRUE(has(two("[0,4]", "[3,7]", 7), {"byte 4, got byte 3", "\"b\""}));  // overlap
  EXPECT_TRUE(has(two("[0,4]", "[5,9]", 9), {"byte 4, got byte 5", "\"b\""}));  // hole
  EXPECT_TRUE(has(two("[1,5]", "[5,9]", 9), {"byte 0, got byte 1", "\"a\""}));  // first not 0
  EXPECT_TRUE(has(two("[0,4]", "[4,8]", 9), {"8 bytes of tensors, got 9"}));    // bytes after
  EXPECT_TRUE(has(two("[0,4]", "[4,8]", 7), {"inside 7 bytes", "\"b\""}));
  EXPECT_TRUE(has(two("[0,4]", "[0,4]", 4), {"byte 4, got byte 0"}));  // same bytes
  EXPECT_TRUE(has(refusal(small_file() + "PK\x05\x06"), {"32 bytes of tensors, got 36"}));
}

TEST(SafetensorsFile, NamesAreKeysAndNeverPaths) {
  const TempFolder folder;
  const std::string long_name(1 << 16, 'x');
  const std::string json = "{"s + entry("../../x", "F32", "[0]", "[0,0]") + "," +
                           entry("/etc/x", "F32", "[0]", "[0,0]") + "," +
                           entry("\xC3\xA9", "F32", "[0]", "[0,0]") + "," +
                           entry("e\xCC\x81", "F32", "[0]", "[0,0]") + "," +
                           entry(long_name, "F32", "[0]", "[0,0]") + "}";
  const SafetensorsFile file(folder.write("a.safetensors", file_of(json, 0)));
  EXPECT_EQ(file.tensors().size(), 5u);
  EXPECT_NE(file.find("../../x"), nullptr);
  EXPECT_NE(file.find(long_name), nullptr);
  EXPECT_LT(refusal_of_header("{"s + entry(long_name, "F5", "[]", "[0,4]") + "}", 4).size(), 500u);
}

TEST(SafetensorsFile, HostileHeadersCostNoMoreThanTheirLength) {
  std::string many = "{";
  while (many.size() < 30'000'000) {
    many += entry(std::to_string(many.size()), "F32", "[0]", "[0,0]") + ",";
  }
  many.back() = '}';
  EXPECT_TRUE(has(refusal_of_header(many), {"at most 262144 tensors"}));
  std::string metadata = "{\"__metadata__\":{";
  for (int i = 0; i < 300'000; ++i) metadata += fmt::format("\"{}\":\"\",", i);
  metadata.back() = '}';
  EXPECT_TRUE(has(refusal_of_header(metadata + "}"), {"too many"}));
  std::string long_names = "{";
  for (int i = 0; i < 1000; ++i) {
    long_names += entry(std::string(10'000, 'x') + std::to_string(i), "F32", "[0]", "[0,0]") + ",";
  }
  long_names.back() = '}';
  const TempFolder folder;
  const SafetensorsFile file(folder.write("a.safetensors", file_of(long_names, 0)));
  EXPECT_EQ(file.tensors().size(), 1000u);
}

TEST(SafetensorsFile, RefusesWhatIsNotAFileWithoutWaiting) {
  const TempFolder folder;
  const auto refuse = [](const std::string& path) {
    return error_of<IoError>([&] { SafetensorsFile{path}; });
  };
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_TRUE(has(refuse(folder / "pipe"), {"a pipe", "pipe"}));
  EXPECT_TRUE(has(refuse(folder.path()), {"a folder"}));
  EXPECT_TRUE(has(refuse("/dev/zero"), {"a device"}));
  EXPECT_TRUE(has(refuse(folder / "none"), {"No such file"}));
  const std::string sparse = folder.write("sparse", "");
  std::filesystem::resize_file(sparse, std::uintmax_t{1} << 40);
  EXPECT_TRUE(has(refuse(sparse), {"header of 2 to 100000000 bytes, got 0"}));
}

TEST(SafetensorsFile, AFileCutShortWhileOpenIsAnError) {
  const TempFolder folder;
  const std::string path = folder.write(
      "a.safetensors", file_of("{"s + entry("a", "F32", "[100000]", "[0,400000]") + "}", 400000));
  const SafetensorsFile file(path);
  std::filesystem::resize_file(path, 1000);
  std::vector<float> out(100000);
  EXPECT_TRUE(has(error_of<IoError>([&] { file.read(*file.find("a"), 0, out); }),
                  {"the end of the file", "a.safetensors"}));
}

TEST(SafetensorsFile, LoadsValuesThatAreNotNumbers) {
  const TempFolder folder;
  const std::string path = folder / "a.safetensors";
  const std::vector<float> values{std::nanf(""), -std::numeric_limits<float>::infinity(), 1e-45f};
  SafetensorsWriter writer(path, {{"a", {3}}});
  writer.write("a", values);
  writer.finish();
  const SafetensorsFile file(path);
  std::vector<float> back(3);
  file.read(*file.find("a"), 0, back);
  EXPECT_EQ(std::memcmp(back.data(), values.data(), 12), 0);
}

// Only a success or an IoError, never a crash; meant for the address sanitizer as well.
TEST(SafetensorsFile, SurvivesTruncationAtEveryByteAndRandomDamage) {
  const std::string sound = small_file();
  const TempFolder folder;
  const auto try_to_read = [&](const std::string& bytes) {
    const std::string path = folder.write("a.safetensors", bytes);
    try {
      const SafetensorsFile file(path);
      std::vector<float> out;
      for (const TensorInfo& tensor : file.tensors()) {
        if (!SafetensorsFile::can_read(tensor)) continue;
        out.resize(static_cast<std::size_t>(numel(tensor.shape)));
        file.read(tensor, 0, out);
      }
      return true;
    } catch (const IoError&) {
      return false;
    }
  };
  EXPECT_TRUE(try_to_read(sound));
  for (std::size_t n = 0; n < sound.size(); ++n) EXPECT_FALSE(try_to_read(sound.substr(0, n))) << n;
  std::mt19937 random(1);
  const auto damage = [&](std::string bytes) {
    for (unsigned flips = 1 + random() % 3; flips > 0; --flips) {
      bytes[random() % bytes.size()] ^= static_cast<char>(1u << random() % 8);
    }
    return bytes;
  };
  for (int i = 0; i < 200; ++i) try_to_read(damage(sound));
  const std::string json = sound.substr(8, sound.size() - 8 - 32);
  int num_sound = 0;
  for (int i = 0; i < 20'000; ++i) {
    try {
      parse_safetensors_header(damage(json), 32, "damaged");
      ++num_sound;  // in names, for example
    } catch (const IoError&) {
    }
  }
  EXPECT_GT(num_sound, 0);
  EXPECT_LT(num_sound, 10'000);
}

TEST(SafetensorsWriter, WritesWhatTheFormatSays) {
  const TempFolder folder;
  const std::string path = folder / "a.safetensors";
  SafetensorsWriter writer(path, {{"w", {2, 3}}, {"b \"\xC3\xA9", {}}, {"none", {0}}});
  const std::vector<float> w{1, 2, 3, 4, 5, 6}, b{-0.5f};
  writer.write("w", w);
  writer.write("b \"\xC3\xA9", b);
  writer.write("none", {});
  EXPECT_FALSE(std::filesystem::exists(path));
  writer.finish();
  EXPECT_EQ(folder.num_entries(), 1);

  const std::string bytes = folder.read("a.safetensors");
  std::uint64_t n = 0;
  std::memcpy(&n, bytes.data(), 8);
  EXPECT_EQ(n % 8, 0u);
  const auto json = nlohmann::json::parse(bytes.substr(8, n));
  EXPECT_EQ(json.at("__metadata__"), nlohmann::json({{"format", "pt"}}));
  EXPECT_EQ(json.at("w"),
            nlohmann::json({{"dtype", "F32"}, {"shape", {2, 3}}, {"data_offsets", {0, 24}}}));
  EXPECT_EQ(json.at("none").at("data_offsets"), nlohmann::json({28, 28}));
  EXPECT_EQ(std::memcmp(bytes.data() + 8 + n, w.data(), 24), 0);
  const SafetensorsFile file(path);
  std::vector<float> back(2);
  file.read(*file.find("w"), 3, back);
  EXPECT_EQ(back, (std::vector<float>{4, 5}));
}

TEST(SafetensorsWriter, WritesSeveralTensorsAndAllMetadata) {
  const TempFolder folder;
  const std::string path = folder / "a.safetensors";
  const SafetensorsMetadata metadata = {{"a", "1"}, {"b \"", "\xC3\xA9"}, {"c", ""}};
  const std::vector<float> x{1, 2, 3}, y{4, 5};
  SafetensorsWriter writer(path, {{"none", {0, 4}}, {"x", {3}}, {"also none", {0}}, {"y", {2, 1}}},
                           metadata);
  writer.write("none", {});
  writer.write("x", x);
  writer.write("also none", {});
  writer.write("y", y);
  writer.finish();
  const SafetensorsFile file(path);
  EXPECT_EQ(file.metadata(), metadata);
  ASSERT_EQ(file.tensors().size(), 4u);
  std::vector<float> back(3), one(1);
  file.read(*file.find("x"), 0, back);
  EXPECT_EQ(back, x);
  file.read(*file.find("y"), 1, one);
  EXPECT_EQ(one[0], 5);
  EXPECT_EQ(file.find("y")->shape, (std::vector<std::int64_t>{2, 1}));
}

TEST(SafetensorsWriter, RefusesTheWrongTensorSizeOrNumber) {
  const TempFolder folder;
  const std::vector<float> two(2), three(3);
  const auto make = [&] { return SafetensorsWriter(folder / "a", {{"x", {2}}, {"y", {3}}}); };
  EXPECT_TRUE(
      has(error_of<InvalidArgument>([&] { make().write("y", three); }), {"\"x\" of 2", "\"y\""}));
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { make().write("x", three); }), {"of 2", "of 3"}));
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { make().finish(); }), {"2 tensors, got 0"}));
  auto writer = make();
  writer.write("x", two);
  writer.write("y", three);
  EXPECT_TRUE(
      has(error_of<InvalidArgument>([&] { writer.write("z", two); }), {"no more", "\"z\""}));
  writer.finish();
  EXPECT_THROW(writer.finish(), InvalidArgument);
}

TEST(SafetensorsWriter, RefusesNamesThatTheReaderWouldRefuse) {
  const TempFolder folder;
  for (const auto& specs :
       {std::vector<TensorSpec>{{"a", {1}}, {"a", {1}}},
        std::vector<TensorSpec>{{"__metadata__", {1}}},
        std::vector<TensorSpec>{{std::string("a\0b", 3), {1}}},
        std::vector<TensorSpec>{{"\xFF", {1}}}, std::vector<TensorSpec>{{"a", {-1}}}}) {
    EXPECT_THROW(SafetensorsWriter(folder / "a", specs), InvalidArgument);
  }
  EXPECT_EQ(folder.num_entries(), 0);
}

TEST(SafetensorsWriter, WithoutFinishLeavesWhatWasThere) {
  const TempFolder folder;
  const std::string path = folder.write("a", "old");
  {
    SafetensorsWriter writer(path, {{"x", {2}}});
    writer.write("x", std::vector<float>(2));
  }
  EXPECT_EQ(folder.read("a"), "old");
  EXPECT_EQ(folder.num_entries(), 1);
}

TEST(SafetensorsWriter, WhenTheDiskIsFullLeavesTheOldFileAndSaysSo) {
  const TempFolder folder;
  const std::string path = folder.write("a", "old");
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  ::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{1 << 16, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string error = error_of<IoError>([&] {
    SafetensorsWriter writer(path, {{"x", {1 << 15}}});
    writer.write("x", std::vector<float>(1 << 15));
    writer.finish();
  });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_TRUE(has(error, {std::string_view(path), "File too large"}));
  EXPECT_EQ(folder.read("a"), "old");
  EXPECT_EQ(folder.num_entries(), 1);
}

TEST(SafetensorsWriter, NamesThePathItCannotWrite) {
  const TempFolder folder;
  const auto refuse = [](const std::string& path) {
    return error_of<IoError>([&] { SafetensorsWriter(path, {{"x", {2}}}); });
  };
  EXPECT_TRUE(has(refuse(folder / "no/a"), {"no/a", "No such file or directory"}));
  EXPECT_TRUE(has(refuse(folder.write("file", "") + "/a"), {"file/a", "Not a directory"}));
  EXPECT_TRUE(has(refuse(folder.path()), {"a folder"}));
  EXPECT_TRUE(has(refuse("/dev/full"), {"/dev/full", "a device"}));
}

}  // namespace
}  // namespace tessera::engine
