// Manifests that are damaged, hostile or of another version.
#include "shard/checkpoint/manifest.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdint>
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
#include "tests/shard/checkpoint_run.h"
#include "tests/testing/errors.h"
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

/// The same of JSON, in which the checksum is replaced.
std::string text_of(json all) {
  all.erase("xxh3");
  std::string text = all.dump();
  text.back() = ',';
  return with_checksum(text + "\"xxh3\": \"");
}

void check(const std::string& text) { parse_manifest(text, "m").check_complete("m"); }

TEST(CheckpointManifest, EveryFlippedBitAndEveryLengthIsDamage) {
  const TempFolder folder;
  saved_in(folder);
  const std::string text = folder.read(kManifest);
  check(text);
  for (std::size_t bit = 0; bit < 8 * text.size(); ++bit) {
    std::string damaged = text;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    // Not of another version either: that would not be passed over.
    EXPECT_THROW(check(damaged), IoError) << "bit " << bit;
  }
  for (std::size_t nbytes = 0; nbytes < text.size(); ++nbytes) {
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
  const auto try_it = [&](const json& edited) {
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
  EXPECT_GT(num_errors, 3000);
  EXPECT_GT(num_read, 100);  // names of what nobody asks for, values
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  EXPECT_LT(usage.ru_maxrss, 1 << 20) << "KiB";
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
  // The same bytes many times.
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
