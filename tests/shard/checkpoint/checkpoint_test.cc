// Checkpoints: what is loaded is what was saved, whoever loads it; what is damaged is found.
#include "shard/checkpoint/checkpointer.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "engine/error.h"
#include "engine/io/xxh3.h"
#include "shard/checkpoint/folder.h"
#include "shard/checkpoint/reader.h"
#include "tests/shard/checkpoint/checkpoint_run.h"
#include "tests/testing/errors.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/temp_folder.h"

namespace tessera::shard {
namespace {

using testing::CheckpointResult;
using testing::CheckpointRun;
using testing::TempFolder;
using testing::train_saving;
using testing::Training;

namespace fs = std::filesystem;

CheckpointRun run_in(const TempFolder& folder, const Training& training, bool async = true) {
  return {.training = training, .checkpoints = {.folder = folder / "c", .async = async}};
}

Training of(const char* strategy, int ranks, int accum, int steps, bool adamw = true) {
  Training t{.ranks = ranks, .accum = accum, .steps = steps, .numel = 700, .adamw = adamw};
  t.options.placement = Placement::preset(strategy);
  return t;
}

TEST(Checkpoint, ResumesWithTheBitsOfAnUninterruptedRunOnAnyRanksAndStrategy) {
  const TempFolder without;
  CheckpointRun whole = run_in(without, of("zero3", 4, 3, 12));
  whole.save_every = 0;
  const CheckpointResult expected = train_saving(whole);
  int number = 0;
  // 12 micro-batches a step, whoever computes them.
  for (const char* saved : {"zero3", "ddp", "zero1", "zero2", "hsdp", "hfsdp"}) {
    for (const bool async : {true, false}) {
      if (testing::kIsSlow && ++number % 4 < 2) continue;  // one of the two, in turn
      const TempFolder folder;
      const CheckpointResult first = train_saving(run_in(folder, of(saved, 4, 3, 5), async));
      EXPECT_EQ(first.first_step, 0);
      EXPECT_EQ(async, first.copy_nbytes > 0);
      for (const int ranks : {3, 1, 2}) {
        CheckpointRun next =
            run_in(folder, of(ranks == 3 ? "ddp" : "zero3", ranks, 12 / ranks, 12));
        next.save_every = 0;
        const CheckpointResult result = train_saving(next);
        EXPECT_EQ(result.first_step, 5);
        EXPECT_EQ(result.saved_values.at("position"), "5");
        EXPECT_EQ(result.values, expected.values) << saved << " to " << ranks << " ranks";
        EXPECT_EQ(result.warnings, std::vector<std::string>());
      }
    }
  }
}

TEST(Checkpoint, KeepsTheNewestAndNamesTheLatest) {
  const TempFolder folder;
  CheckpointRun run = run_in(folder, of("zero3", 2, 1, 7));
  run.checkpoints.keep = 2;
  train_saving(run);
  EXPECT_EQ(steps_in(folder / "c"), (std::vector<std::int64_t>{7, 6}));
  EXPECT_EQ(folder.read("c/latest"), "step_7\n");
  run.training.steps = 9;
  run.checkpoints.keep = 0;
  EXPECT_EQ(train_saving(run).first_step, 7);
  EXPECT_EQ(steps_in(folder / "c"), (std::vector<std::int64_t>{9, 8, 7, 6}));
}

TEST(Checkpoint, ALockThatIsALinkIsRefused) {
  const TempFolder folder;
  fs::create_symlink(folder / "elsewhere", folder / ".lock");
  EXPECT_TRUE(testing::has(
      testing::error_of<engine::IoError>([&] { const CheckpointFolder c(folder.path()); }),
      {"expected to write here", ".lock"}));
  EXPECT_EQ(folder.num_entries(), 1);
}

TEST(Checkpoint, TheManifestHasTheChecksumOfEachFile) {
  const TempFolder folder;
  train_saving(run_in(folder, of("zero3", 2, 1, 1)));
  const CheckpointReader reader(checkpoint_path(folder / "c", 1));
  EXPECT_EQ(reader.manifest().files.size(), 4u);  // two of each rank
  for (const CheckpointFile& file : reader.manifest().files) {
    const std::string bytes = folder.read("c/step_1/" + file.name);
    EXPECT_EQ(engine::xxh3(std::as_bytes(std::span(bytes))), file.xxh3) << file.name;
  }
}

TEST(Checkpoint, EveryByteOfEveryFileIsChecked) {
  const TempFolder folder;
  CheckpointRun run = run_in(folder, of("zero3", 2, 1, 2));
  run.training.blocks = 1;
  run.training.numel = 200;
  run.checkpoints.keep = 2;
  train_saving(run);
  const std::string newest = checkpoint_path(folder / "c", 2);
  run.save_every = 0;
  run.training.steps = 4;
  const CheckpointResult expected = train_saving(run);
  EXPECT_EQ(expected.first_step, 2);
  int num_files = 0;
  for (const auto& entry : fs::directory_iterator(newest)) {
    ++num_files;
    const std::string name = "c/step_2/" + entry.path().filename().string();
    const std::string bytes = folder.read(name);
    const std::size_t stride =
        std::max<std::size_t>(1, bytes.size() / (testing::kIsSlow ? 10 : 40));
    for (std::size_t at = 0; at < bytes.size(); at += stride) {
      std::string damaged = bytes;
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << (at % 8)));
      folder.write(name, damaged);
      const CheckpointResult result = train_saving(run);
      EXPECT_EQ(result.first_step, 1) << name << " byte " << at;
      EXPECT_EQ(result.values, expected.values);
      EXPECT_EQ(result.warnings.size(), 1u);
    }
    for (const std::size_t nbytes : {std::size_t{0}, bytes.size() - 1}) {
      folder.write(name, bytes.substr(0, nbytes));
      EXPECT_EQ(train_saving(run).first_step, 1) << name << " cut to " << nbytes;
    }
    folder.write(name, bytes + "\n");
    EXPECT_EQ(train_saving(run).first_step, 1) << name << " longer";
    folder.write(name, bytes);
    EXPECT_EQ(train_saving(run).first_step, 2);
  }
  EXPECT_EQ(num_files, 5);  // the manifest, and two of each rank
}

TEST(Checkpoint, AFileThatIsMissingOrBelongsElsewhereIsRefusedByName) {
  const TempFolder folder, other;
  CheckpointRun run = run_in(folder, of("zero3", 2, 1, 2));
  train_saving(run);
  CheckpointRun elsewhere = run;
  elsewhere.checkpoints.folder = other / "c";
  train_saving(elsewhere);
  const std::string step_1 = folder / "c/step_1/", step_2 = folder / "c/step_2/",
                    elsewhere_2 = other / "c/step_2/";
  for (const char* kind : {"model", "state"}) {
    const std::string first = fmt::format("{}-00000-of-00002.safetensors", kind),
                      second = fmt::format("{}-00001-of-00002.safetensors", kind);
    // Not found by its size alone.
    ASSERT_EQ(fs::file_size(step_2 + second), fs::file_size(elsewhere_2 + second));
    ASSERT_EQ(fs::file_size(step_2 + second), fs::file_size(step_1 + second));
    struct Case {
      const char* what;
      std::string from;  // takes the place of `second` in step 2; empty: nothing does
    };
    const Case cases[] = {{"missing", ""},
                          {"another rank's", step_2 + first},
                          {"another step's", step_1 + second},
                          {"another run's", elsewhere_2 + second}};
    for (const Case& c : cases) {
      const std::string place = step_2 + second, kept = folder / "kept";
      fs::rename(place, kept);
      if (!c.from.empty()) fs::copy_file(c.from, place);
      CheckpointRun next = run;
      next.save_every = 0;
      const CheckpointResult result = train_saving(next);
      EXPECT_EQ(result.first_step, 1) << c.what;
      ASSERT_EQ(result.warnings.size(), 1u) << c.what;
      EXPECT_TRUE(testing::has(result.warnings[0], {"passed over, as it does not verify", place}))
          << c.what;
      next.from = folder / "c/step_2";
      EXPECT_TRUE(testing::has(testing::error_of<engine::IoError>([&] { train_saving(next); }),
                               {place, "(rank "}))
          << c.what;
      fs::rename(kept, place);
    }
    // Both are there, under each other's name.
    const auto exchange = [&] {
      fs::rename(step_2 + first, folder / "kept");
      fs::rename(step_2 + second, step_2 + first);
      fs::rename(folder / "kept", step_2 + second);
    };
    exchange();
    const CheckpointResult result = train_saving(run);
    EXPECT_EQ(result.first_step, 1);
    EXPECT_TRUE(testing::has(result.warnings.at(0), {"does not verify", step_2 + first}));
    fs::remove_all(folder / "c/step_2");
    fs::rename(folder / "c/step_2.damaged-0", folder / "c/step_2");
    exchange();
    EXPECT_EQ(train_saving(run).first_step, 2);
  }
}

}  // namespace
}  // namespace tessera::shard
