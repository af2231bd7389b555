// What TensorBoard is told of a run.
#include "tools/report/tensorboard.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/io/event_reader.h"

namespace tessera::tools {
namespace {

using testing::error_of;
using testing::EventRead;
using testing::EventReader;
using testing::has;
using testing::TempFolder;

StepRecord record_of(std::int64_t step) {
  StepRecord record{.step = step, .loss = 2.5, .grad_norm = 0.5f, .lr = 0.25, .step_ms = 16};
  record.items_per_s = 1000;
  record.exposed_comm_ms = 2;
  record.data_ms = 1;
  record.compute_ms = 8;
  record.optimizer_ms = 4;
  for (int c = 0; c < engine::kNumCategories; ++c) {
    record.memory.peak_nbytes[static_cast<std::size_t>(c)] = 100 + c;
  }
  record.memory.peak_total_nbytes = 500;
  return record;
}

std::vector<EventRead> read(const TempFolder& folder, const TensorBoardLog& log) {
  return EventReader::read(folder.read(std::filesystem::path(log.path()).filename().string()));
}

TEST(TensorBoardLog, HoldsEveryFigureUnderItsTag) {
  const TempFolder folder;
  TensorBoardLog log(folder.path(), "tokens");
  log.begin(1);
  log.step(record_of(1), 75);
  StepRecord skipped = record_of(2);
  skipped.skipped = "w";
  skipped.compute_ms.reset();
  skipped.optimizer_ms.reset();
  log.step(skipped, std::nullopt);
  log.validation(2, 1.5);
  log.flush(nullptr);
  const std::vector<EventRead> events = read(folder, log);
  ASSERT_EQ(events.size(), 5u);
  EXPECT_EQ(events[0].version, "brain.Event:2");
  EXPECT_TRUE(events[1].starts_session);
  std::map<std::string, float> expected = {
      {"train/loss", 2.5f},       {"train/grad_norm", 0.5f},   {"train/lr", 0.25f},
      {"time/step_ms", 16},       {"time/exposed_comm_ms", 2}, {"time/data_ms", 1},
      {"time/compute_ms", 8},     {"time/optimizer_ms", 4},    {"speed/tokens_per_s", 1000},
      {"speed/peak_percent", 75}, {"peak_bytes/total", 500}};
  for (int c = 0; c < engine::kNumCategories; ++c) {
    const std::string tag = "peak_bytes/" + std::string(name_of(static_cast<engine::Category>(c)));
    expected[tag] = static_cast<float>(100 + c);
  }
  EXPECT_EQ(events[2].step, 1);
  EXPECT_EQ(events[2].scalars, expected);
  for (const char* unknown :
       {"train/grad_norm", "time/compute_ms", "time/optimizer_ms", "speed/peak_percent"}) {
    expected.erase(unknown);
  }
  EXPECT_EQ(events[3].step, 2);
  EXPECT_EQ(events[3].scalars, expected);
  EXPECT_EQ(events[4].step, 2);
  EXPECT_EQ(events[4].scalars, (std::map<std::string, float>{{"validation/val_loss", 1.5f}}));
  EXPECT_GT(events[4].wall_time, 1.6e9);
}

TEST(TensorBoardLog, ARunThatDoesNotBeginLeavesNoFile) {
  const TempFolder folder;
  {
    const TensorBoardLog log(folder / "some/where", "tokens");
    EXPECT_TRUE(std::filesystem::exists(log.path()));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder / "some/where"));
}

TEST(TensorBoardLog, RunsShareNoFileAndLeaveTheirs) {
  const TempFolder folder;
  std::vector<std::unique_ptr<TensorBoardLog>> logs;
  for (int i = 0; i < 3; ++i) {
    logs.push_back(std::make_unique<TensorBoardLog>(folder.path(), "tokens"));
    logs.back()->begin(1);
    EXPECT_TRUE(has(logs.back()->path(), {"/events.out.tfevents."}));
  }
  EXPECT_EQ(folder.num_entries(), 3);
  logs.clear();
  EXPECT_EQ(folder.num_entries(), 3);
}

TEST(TensorBoardLog, AFolderThatCannotBeIsNamed) {
  const TempFolder folder;
  const std::string path = folder.write("file", "") + "/below";
  EXPECT_TRUE(has(error_of<engine::IoError>([&] { TensorBoardLog(path, "tokens"); }),
                  {"[tensorboard]", path, "log.tensorboard"}));
}

}  // namespace
}  // namespace tessera::tools
