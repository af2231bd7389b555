// Manifests that are damaged, hostile or of another version.
#include "shard/checkpoint/manifest.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/io/xxh3.h"
#include "engine/philox.h"
#include "shard/checkpoint/reader.h"
#include "tests/shard/checkpoint/checkpoint_run.h"
#include "tests/testing/errors.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/temp_folder.h"

namespace tessera::shard {
namespace {

using engine::InvalidArgument;
using engine::IoError;
using nlohmann::json;
using testing::error_of;
using testing::has;
using testing::TempFolder;

// One of 2 ranks that wrote 2 checkpoints; in step_2 three parameters.
testing::CheckpointRun saved_in(const TempFolder& folder) {
  testing::CheckpointRun run{.training = {.steps = 2, .blocks = 1, .numel = 70, .adamw = true},
                             .checkpoints = {.folder = folder / "c"}};
  run.training.options.placement = Placement::preset("zero3");
  testing::train_saving(run);
  return run;
}

constexpr std::string_view kManifest = "c/step_2/manifest.json";

/// The text with the checksum that it ought to have.
std::string with_checksum(std::string text) {
  const std::string_view mark = "\"xxh3\": \"";
  text.resize(text.rfind(mark));
  const std::uint64_t checksum = engine::xxh3(std::as_bytes(std::span(text)));
  return fmt::format("{}{}{:016x}\"\n}}\n", text, mark, checksum);
}

/// `all` as text, with the checksum that it ought to have.
std::string text_of(json all) {
  all.erase("xxh3");
  std::string text = all.dump();
  text.back() = ',';
  return with_checksum(text + "\"xxh3\": \"");
}

void check(const std::string& text) { parse_manifest(text, "m").check_complete("m"); }

constexpr std::size_t kStride = testing::kIsSlow ? 31 : 1;

TEST(CheckpointManifest, EveryFlippedBitAndEveryLengthIsDamage) {
  const TempFolder folder;
  saved_in(folder);
  const std::string text = folder.read(kManifest);
  check(text);
  for (std::size_t bit = 0; bit < 8 * text.size(); bit += kStride) {
    std::string damaged = text;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    // Not of another version either: that would not be passed over.
    EXPECT_THROW(check(damaged), IoError) << "bit " << bit;
  }
  for (std::size_t nbytes = 0; nbytes < text.size(); nbytes += kStride) {
    EXPECT_THROW(check(text.substr(0, nbytes)), IoError) << nbytes;
  }
  EXPECT_THROW(check(text + "\n"), IoError);
}

// Every value, wherever it is, replaced and removed, under a checksum that is right. Each is an
// error, or a manifest that can be read without one.
TEST(CheckpointManifest, EveryFieldMayBeAnything) {
  const TempFolder folder;
  saved_in(folder);
  const json whole = json::parse(folder.read(kManifest));
  check(text_of(whole));
  const std::vector<json> others = {nullptr,
                                    true,
                                    -1,
                                    0,
                                    1,
                                    7,
                                    1.5,
                                    1e300,
                                    9223372036854775807,
                                    18446744073709551615u,
                                    1152921504606846975,
                                    1 << 24,
                                    "",
                                    "x",
                                    "..",
                                    "a/b",
                                    std::string("a\0b", 3),
                                    "F32",
                                    "I64",
                                    std::string(16, '0'),
                                    std::string(17, 'f'),
                                    json::array(),
                                    json::array({0}),
                                    json::array({-1}),
                                    json::array({1ull << 47, 1ull << 47}),
                                    json::array({0, 1ull << 62}),
                                    json::object(),
                                    json::object({{"a", 1}})};
  int num_errors = 0, num_read = 0;
  std::size_t number = 0;
  const auto try_it = [&](const json& edited) {
    if (number++ % kStride != 0) return;
    const std::string text = text_of(edited);
    folder.write(kManifest, text);
    try {
      CheckpointReader reader(folder / "c/step_2");
      for (std::size_t f = 0; f < reader.manifest().files.size(); ++f) reader.check_header(f);
      for (const CheckpointTensor& t : reader.manifest().tensors) {
        std::vector<float> values(static_cast<std::size_t>(t.numel()));
        reader.read(t, 0, values);
        if (t.numel() > 3) reader.read(t, 1, std::span(values).first(2));
        EXPECT_EQ(std::ssize(reader.read_bytes(t)), t.numel() * size_of(t.dtype));
      }
      ++num_read;
    } catch (const IoError&) {
      ++num_errors;
    } catch (const InvalidArgument& e) {
      ++num_errors;
      EXPECT_TRUE(has(e.what(), {"m"})) << e.what();
    }
  };
  const json flat = whole.flatten();
  for (const auto& [pointer, value] : flat.items()) {
    // The first of a list stand for all.
    if (pointer.starts_with("/tensors/") && pointer > "/tensors/2") continue;
    if (pointer.starts_with("/files/") && pointer > "/files/1") continue;
    json::json_pointer at(pointer);
    for (; !at.empty(); at.pop_back()) {
      for (const json& other : others) {
        json edited = whole;
        edited[at] = other;
        try_it(edited);
      }
      json edited = whole;
      json& parent = edited[at.parent_pointer()];
      if (parent.is_object()) parent.erase(at.back());
      if (parent.is_array()) parent.erase(std::stoul(at.back()));
      try_it(edited);
    }
  }
  EXPECT_GT(num_errors, testing::kIsSlow ? 50 : 1000);
  EXPECT_GT(num_read, testing::kIsSlow ? 1 : 50);  // names of what nobody asks for, values
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  EXPECT_LT(usage.ru_maxrss, testing::kIsSlow ? 8 << 20 : 1 << 20) << "KiB";
}

TEST(CheckpointManifest, RangesOfAFewBytesDoNotStandForMany) {
  const TempFolder folder;
  saved_in(folder);
  const json whole = json::parse(folder.read(kManifest));
  // Empty ranges, between which a reader would search.
  json edited = whole;
  json& ranges = edited["tensors"][0]["ranges"];
  json empty = ranges[0];
  empty["numel"] = 0;
  empty["xxh3"] = "";
  for (int i = 0; i < 5; ++i) ranges.push_back(empty);
  folder.write(kManifest, text_of(edited));
  {
    CheckpointReader reader(folder / "c/step_2");
    const CheckpointTensor& t = reader.manifest().tensors[0];
    std::vector<float> last(1);
    for (std::int64_t i = 0; i < t.numel(); ++i) reader.read(t, i, last);
  }
  // One range of bytes, named many times.
  edited = whole;
  json& tensor = edited["tensors"][0];
  json range = tensor["ranges"][0];
  tensor["ranges"] = json::array();
  for (int i = 0; i < 1000; ++i) {
    range["begin"] = i * range["numel"].get<std::int64_t>();
    tensor["ranges"].push_back(range);
  }
  tensor["shape"] = {1000 * range["numel"].get<std::int64_t>()};
  EXPECT_TRUE(has(error_of<IoError>([&] { check(text_of(edited)); }), {"share byte", "m)"}));
  // Parts of a tensor that are not there.
  edited = whole;
  edited["tensors"][0]["num_parts"] = 1 << 24;
  edited["tensors"][0]["part"] = 3;
  EXPECT_TRUE(
      has(error_of<IoError>([&] { check(text_of(edited)); }), {"expected 16777216 parts, got 1"}));
  // A header that is all of a large file.
  edited = whole;
  edited["files"][0]["nbytes"] = edited["files"][0]["header_nbytes"] = std::int64_t{1} << 40;
  EXPECT_TRUE(has(error_of<IoError>([&] { check(text_of(edited)); }), {"header of at most"}));
}

CheckpointFile file_of(const char* name, std::int64_t nbytes) {
  return {.name = name, .nbytes = nbytes, .header_nbytes = 20};
}

CheckpointRange range_of(std::size_t file, std::int64_t offset, std::int64_t begin,
                         std::int64_t numel) {
  return {.file = file, .offset = offset, .begin = begin, .numel = numel, .xxh3 = {7}};
}

// Two files in which tensors lie side by side, with no byte to spare.
//   f0: header 20 | w[0, 6) f32 24 | b bf16 16 | e of part 0 20 | e of part 1 20
//   f1: header 20 | w[6, 10) f32 16
json small_manifest() {
  Manifest m;
  m.step = 3;
  m.values = {{"a", "b"}};
  m.optimizers = {{.num_steps = 3, .groups = {{"all", 1, 0.1}}}};
  m.files = {file_of("f0", 100), file_of("f1", 36)};
  m.tensors = {{.kind = "parameter",
                .name = "w",
                .shape = {2, 5},
                .ranges = {range_of(0, 20, 0, 6), range_of(1, 20, 6, 4)}},
               {.kind = "parameter",
                .name = "b",
                .dtype = engine::DType::kBF16,
                .shape = {8},
                .ranges = {range_of(0, 44, 0, 8)}}};
  for (const int part : {0, 1}) {
    m.tensors.push_back({.kind = "buffer",
                         .name = "e",
                         .part = part,
                         .num_parts = 2,
                         .shape = {5},
                         .ranges = {range_of(0, 60 + 20 * part, 0, 5)}});
  }
  return json::parse(to_text(m));
}

// What is wrong, by one value each, and what is said.
TEST(CheckpointManifest, EachRuleIsKept) {
  struct Case {
    const char *at, *value;  // JSON pointer, JSON
    std::vector<std::string> said;
  };
  const std::vector<Case> cases = {
      // Bytes of files.
      {"/tensors/0/ranges/0/offset", "19", {"bytes inside f0", "6 elements at 19", "w"}},
      {"/tensors/0/ranges/0/offset", "0", {"bytes inside f0", "6 elements at 0"}},
      {"/files/0/header_nbytes", "21", {"bytes inside f0", "6 elements at 20"}},
      {"/files/0/header_nbytes", "101", {"header of at most 100 bytes, got 101", "f0"}},
      {"/files/0/nbytes", "99", {"bytes inside f0", "5 elements at 80", "e"}},
      {"/files/1/nbytes", "35", {"bytes inside f1", "4 elements at 20"}},
      {"/tensors/3/ranges/0/offset", "101", {"bytes inside f0", "5 elements at 101"}},
      {"/tensors/3/ranges/0/file", "2", {"one of 2 files, got 2"}},
      // Bytes that two have.
      {"/tensors/1/ranges/0/offset", "43", {"share byte 43 of f0"}},
      {"/tensors/1/ranges/0/offset", "45", {"share byte 60 of f0"}},
      {"/tensors/1/ranges/0/offset", "22", {"share byte 22 of f0"}},
      {"/tensors/1/ranges/0/offset", "20", {"share byte 20 of f0"}},
      {"/tensors/3/ranges/0/offset", "79", {"share byte 79 of f0"}},
      {"/tensors/1/dtype", "\"F32\"", {"share byte 60 of f0"}},
      {"/tensors/0/ranges/1",
       R"({"file": 0, "offset": 28, "begin": 6, "numel": 4,
                                  "xxh3": "0000000000000000"})",
       {"share byte 28 of f0"}},
      // Elements.
      {"/tensors/0/ranges/1/begin", "5", {"every element once", "element 5 twice", "w"}},
      {"/tensors/0/ranges/1/numel", "3", {"expected 10 elements, got 9", "w"}},
      {"/tensors/0/ranges/1/numel", "5", {"elements of 10, got 5 from 6 on"}},
      {"/tensors/0/ranges/1/begin", "11", {"elements of 10, got 4 from 11 on"}},
      {"/tensors/0/ranges/0/numel", "5", {"every element once", "element 5 nowhere", "w"}},
      {"/tensors/0/shape", "[11]", {"expected 11 elements, got 10"}},
      {"/tensors/0/shape", "[-10]", {"expected a shape", "[-10]"}},
      {"/tensors/0/shape", "[10.0]", {"expected a shape"}},
      {"/tensors/0/shape", "[281474976710656]", {"expected a shape"}},
      {"/tensors/0/shape", "[16777216, 16777216, 256]", {"expected a shape"}},
      {"/tensors/0/ranges/0/xxh3", "\"\"", {"expected 1 checksums, got 0"}},
      {"/tensors/0/ranges/0/xxh3",
       "\"00000000000000000000000000000000\"",
       {"expected 1 checksums, got 2"}},
      {"/tensors/0/ranges/0/xxh3", "\"000000000000000g\"", {"16 hex digits"}},
      {"/tensors/0/ranges/0/xxh3", "\"00\"", {"16 hex digits"}},
      {"/files/0/header_xxh3", "\"\"", {"one checksum as header_xxh3"}},
      // Tensors.
      {"/tensors/1/name", "\"w\"", {"each tensor once, got two", "parameter w"}},
      {"/tensors/3/part", "0", {"each tensor once, got two", "buffer e"}},
      {"/tensors/3/part", "2", {"0 to 1 as part, got 2"}},
      {"/tensors/3/name", "\"f\"", {"expected 2 parts, got 1"}},
      {"/tensors/3/num_parts", "3", {"parts, got 1", "buffer e"}},
      {"/tensors/1/dtype", "\"F64\"", {"expected a dtype, got F64"}},
      {"/tensors/1/kind", "1", {"expected text as kind, got 1"}},
      // Files.
      {"/files/0/name", "\"a/f0\"", {"name of a file in this folder, got a/f0"}},
      {"/files/0/name", "\".f0\"", {"name of a file in this folder, got .f0"}},
      {"/files/0/name", "\"\"", {"name of a file in this folder"}},
      {"/files/0/nbytes", "-1", {"as nbytes, got -1"}},
      // The rest.
      {"/optimizers/0/num_steps", "2147483648", {"as num_steps, got 2147483648"}},
      {"/optimizers/0/num_steps", "-1", {"as num_steps, got -1"}},
      {"/optimizers/0/groups/0/lr_scale", "\"1\"", {"a number as lr_scale"}},
      {"/optimizers/0/groups/0/weight_decay", "null", {"a number as weight_decay"}},
      {"/values/a", "1", {"text as value of a"}},
      {"/ranks", "0", {"as ranks, got 0"}},
      {"/step", "-1", {"as step, got -1"}},
      {"/format", "\"other\"", {"expected format tessera checkpoint, got other"}}};
  const json whole = small_manifest();
  check(text_of(whole));
  for (const Case& c : cases) {
    json edited = whole;
    edited[json::json_pointer(c.at)] = json::parse(c.value);
    const std::string error = error_of<IoError>([&] { check(text_of(edited)); });
    for (const std::string& text : c.said) {
      EXPECT_TRUE(has(error, {text})) << c.at << " = " << c.value << ": " << error;
    }
  }
  // In another order, and with what is empty between.
  json other = whole;
  json& ranges = other["tensors"][0]["ranges"];
  std::swap(ranges[0], ranges[1]);
  json empty = ranges[0];
  empty["numel"] = 0;
  empty["xxh3"] = "";
  ranges.push_back(empty);
  check(text_of(other));
  const Manifest read = parse_manifest(text_of(other), "m");
  ASSERT_EQ(read.tensors[0].ranges.size(), 2u);
  EXPECT_EQ(read.tensors[0].ranges[0].begin, 0);
  EXPECT_EQ(read.tensors[0].ranges[1].begin, 6);
  EXPECT_EQ(read.optimizers[0].groups[0].weight_decay, 0.1);
}

TEST(CheckpointManifest, PartsOfRanksAreAddedUp) {
  const Manifest whole = parse_manifest(text_of(small_manifest()), "m");
  // A file each, as two ranks write it.
  const auto of_file = [&](std::size_t file) {
    Manifest part = whole;
    part.files = {whole.files[file]};
    for (CheckpointTensor& t : part.tensors) {
      std::erase_if(t.ranges, [&](const CheckpointRange& r) { return r.file != file; });
      for (CheckpointRange& r : t.ranges) r.file = 0;
    }
    std::erase_if(part.tensors, [](const CheckpointTensor& t) { return t.ranges.empty(); });
    return part;
  };
  // Also in the other order, in which elements come back to front.
  for (const auto& [first, second] : {std::pair{0u, 1u}, {1u, 0u}}) {
    Manifest all = of_file(first);
    EXPECT_TRUE(has(error_of<IoError>([&] { all.check_complete("m"); }), {"w"}));
    all.add(of_file(second));
    all.check_complete("m");
    EXPECT_EQ(all.tensors.size(), whole.tensors.size());
    for (const CheckpointTensor& t : all.tensors) {
      if (t.name != "w") continue;
      EXPECT_EQ(t.ranges[0].numel, 6);
      EXPECT_EQ(all.files[t.ranges[0].file].name, "f0");
      EXPECT_EQ(all.files[t.ranges[1].file].name, "f1");
    }
  }
  const auto refused = [&](const std::function<void(CheckpointTensor&)>& edit) {
    Manifest all = of_file(0), other = of_file(1);
    edit(other.tensors[0]);
    return error_of<IoError>([&] {
      all.add(other);
      all.check_complete("m");
    });
  };
  EXPECT_TRUE(has(refused([](auto& t) { t.shape = {5, 2}; }), {"one shape", "(2, 5)", "(5, 2)"}));
  EXPECT_TRUE(has(refused([](auto& t) { t.dtype = engine::DType::kBF16; }), {"one shape", "w"}));
  // A copy that is cut otherwise is none.
  EXPECT_TRUE(has(refused([](auto& t) { t.ranges[0].begin = 5; }), {"element 5 twice", "w"}));
}

TEST(CheckpointManifest, ANewerVersionIsRefusedByName) {
  const TempFolder folder;
  testing::CheckpointRun run = saved_in(folder);
  json newer = json::parse(folder.read(kManifest));
  newer["version"] = kCheckpointVersion + 1;
  folder.write(kManifest, text_of(newer));
  // By training too, which must not go on from an older one.
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { testing::train_saving(run); }),
                  {"expected format version 1 to 1, got 2", "newer Tessera", "step_2"}));
  newer["version"] = 0;
  EXPECT_TRUE(has(error_of<IoError>([&] { check(text_of(newer)); }), {"as version, got 0"}));
}

TEST(CheckpointManifest, CopiesMustBeTheSame) {
  const TempFolder folder;
  saved_in(folder);
  const Manifest whole = parse_manifest(folder.read(kManifest), "m");
  Manifest copies = whole, other = whole;
  copies.add(whole);
  copies.check_complete("m");
  EXPECT_EQ(copies.tensors.size(), whole.tensors.size());
  other.tensors[1].ranges[0].xxh3[0] ^= 1;
  EXPECT_TRUE(has(error_of<IoError>([&] { copies.add(other); }),
                  {"copies of the same values", whole.tensors[1].name}));
}

TEST(CheckpointManifest, KeysOfValuesMayBeAnyText) {
  const TempFolder folder;
  saved_in(folder);
  Manifest m = parse_manifest(folder.read(kManifest), "m");
  m.values = {{"a", "x"}, {std::string("a\0b", 3), "y"}, {"", "\x01\n\"\\"}, {"é", "∞"}};
  EXPECT_EQ(parse_manifest(to_text(m), "m").values, m.values);
}

}  // namespace
}  // namespace tessera::shard
