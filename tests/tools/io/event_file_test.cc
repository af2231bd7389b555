// Files for TensorBoard: the bytes that TensorBoard has read, and what a reader of its own finds.
#include "tools/io/event_file.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "tests/tools/io/event_reader.h"

namespace tessera::tools {
namespace {

using testing::EventRead;
using testing::EventReader;

// What tests/golden/event_file.tfevents holds.
std::string golden_text() {
  const std::vector<Scalar> first = {{"train/loss", 5.5}, {"speed/tokens_per_s", 16777217.0}};
  const std::vector<Scalar> second = {
      {"train/loss", -0.125}, {"validation/val_loss", std::numeric_limits<double>::quiet_NaN()}};
  return event_header(1700000000.25, 1) + scalar_event(1700000001.5, 1, first) +
         scalar_event(1700000002.5, 300, second);
}

TEST(Crc32c, IsThatOfTheStandard) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);  // RFC 3720
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(crc32c(""), 0u);
}

TEST(EventFile, IsWhatTensorBoardHasRead) {
  std::ifstream file("tests/golden/event_file.tfevents", std::ios::binary);
  const std::string golden{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  ASSERT_FALSE(golden.empty());
  EXPECT_EQ(golden_text(), golden);
}

TEST(EventFile, ReadsBack) {
  const std::vector<EventRead> events = EventReader::read(golden_text());
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(events[0].version, "brain.Event:2");
  EXPECT_EQ(events[0].wall_time, 1700000000.25);
  EXPECT_TRUE(events[1].starts_session);
  EXPECT_EQ(events[1].step, 1);
  EXPECT_EQ(events[2].step, 1);
  EXPECT_EQ(events[2].wall_time, 1700000001.5);
  EXPECT_EQ(events[2].scalars.at("train/loss"), 5.5f);
  EXPECT_EQ(events[2].scalars.at("speed/tokens_per_s"), 16777216.0f);  // as f32
  EXPECT_EQ(events[3].step, 300);                                      // a varint of two bytes
  EXPECT_TRUE(std::isnan(events[3].scalars.at("validation/val_loss")));
}

TEST(EventFile, AnyStepFits) {
  for (const std::int64_t step : {std::int64_t{0}, std::int64_t{127}, std::int64_t{128},
                                  std::int64_t{16384}, std::numeric_limits<std::int64_t>::max()}) {
    const Scalar scalar{"x", 1};
    EXPECT_EQ(EventReader::read(scalar_event(0, step, {&scalar, 1}))[0].step, step);
  }
}

TEST(EventFile, ADamagedByteIsFound) {
  const std::string text = golden_text();
  for (std::size_t i = 0; i < text.size(); ++i) {
    std::string damaged = text;
    damaged[i] = static_cast<char>(damaged[i] ^ 4);
    EXPECT_THROW(EventReader::read(damaged), std::runtime_error) << i;
  }
}

}  // namespace
}  // namespace tessera::tools
