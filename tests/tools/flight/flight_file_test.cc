// The file of a run that failed: what is written is read back, and what is not such a file refused.
#include "tools/flight/flight_file.h"
#include "tests/testing/json.h"

#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"

namespace tessera::tools {
namespace {

using comm::FlightRecording;
using comm::FlightState;
using engine::IoError;
using nlohmann::json;
using testing::error_of;
using testing::has;
using testing::TempFolder;

FlightRecording sample() {
  return {.now_ns = 9'000'000'001,
          .failed_ns = 8'000'000'000,
          .groups = {{"world", {0, 1, 2}}, {"world:0", {0, 2}}},
          .ranks = {{.rank = 0,
                     .num_calls = 1002,
                     .entries = {{.group = 0,
                                  .sequence = 7,
                                  .op = "all_gather",
                                  .dtype = "bf16",
                                  .label = "h.0\n\"\u202e",
                                  .numel = 1024,
                                  .state = FlightState::kFinished,
                                  .called_ns = 1,
                                  .started_ns = 2,
                                  .ended_ns = 3},
                                 {.group = 1,
                                  .sequence = 0,
                                  .op = "broadcast",
                                  .dtype = "f32",
                                  .label = "",
                                  .numel = 0,
                                  .root = 1,
                                  .state = FlightState::kFailed,
                                  .called_ns = 4,
                                  .started_ns = 5,
                                  .ended_ns = 6},
                                 {.group = 1,
                                  .sequence = 1,
                                  .op = "all_reduce",
                                  .dtype = "f32",
                                  .label = "norm",
                                  .numel = 3,
                                  .onto_sum = true,
                                  .state = FlightState::kStarted,
                                  .called_ns = 7,
                                  .started_ns = 8},
                                 {.group = 1,
                                  .sequence = 2,
                                  .op = "barrier",
                                  .dtype = "",
                                  .label = "end",
                                  .state = FlightState::kCalled,
                                  .called_ns = 9}}},
                    {.rank = 2,
                     .num_calls = 2,
                     .entries = {{.group = 0,
                                  .sequence = 0,
                                  .op = "barrier",
                                  .dtype = "",
                                  .label = "begin",
                                  .state = FlightState::kCalled,
                                  .called_ns = 4},
                                 {.group = 1,
                                  .sequence = 0,
                                  .op = "broadcast",
                                  .dtype = "i32",
                                  .label = "w",
                                  .numel = 5,
                                  .root = 0,
                                  .state = FlightState::kCalled,
                                  .called_ns = 5}}}}};
}

TEST(FlightFile, ReadsBackWhatWasWritten) {
  const TempFolder folder;
  const std::string path = folder.write("flight.json", flight_json(sample(), "[x] the \"cause\""));
  const FlightFile file = read_flight(path);
  EXPECT_EQ(file.error, "[x] the \"cause\"");
  EXPECT_EQ(file.path, path);
  EXPECT_EQ(file.recording, sample());
}

TEST(FlightFile, SaysCallsAsMessagesDo) {
  const FlightRecording r = sample();
  EXPECT_EQ(text_of(r.ranks[0].entries[1], r.groups[1]), "broadcast f32 x 0 from rank 2");
  EXPECT_EQ(text_of(r.ranks[0].entries[2], r.groups[1]), "all_reduce f32 x 3 onto a sum 'norm'");
  EXPECT_EQ(text_of(r.ranks[1].entries[0], r.groups[0]), "barrier 'begin'");
  EXPECT_EQ(text_of(r.ranks[1].entries[1], r.groups[1]), "broadcast i32 x 5 from rank 0 'w'");
}

TEST(FlightFile, WhatIsNoSuchFileIsRefusedByNameAndPlace) {
  const TempFolder folder;
  struct Case {
    std::function<void(json&)> spoil;
    std::string expected;
  };
  const Case cases[] = {
      {[](json& f) { f = json::array(); }, "expected an object, got array"},
      {[](json& f) { f["format"] = "other"; }, "the format 'tessera flight'"},
      {[](json& f) { f.erase("format"); }, "expected format, got none"},
      {[](json& f) { f["version"] = 2; }, "expected version 1 of the format, got 2"},
      {[](json& f) { f["now_ns"] = -1; }, "a count in range as now_ns, got -1"},
      {[](json& f) { f["error"] = 3; }, "text of bounded length as error, got 3"},
      {[](json& f) { f["groups"] = 3; }, "a list as groups"},
      {[](json& f) { f["groups"][0]["members"][1] = 0; }, "each rank once as members, got 0"},
      {[](json& f) { f["groups"][0]["members"][1] = 1e3; }, "a count in range as members"},
      {[](json& f) { f["groups"][0]["name"] = std::string(201, 'x'); }, "bounded length as name"},
      {[](json& f) { f["ranks"][1]["rank"] = 0; }, "expected each rank once, got 0 twice"},
      {[](json& f) { f["ranks"][1]["rank"] = 1u << 30; }, "a count in range as rank"},
      {[](json& f) { f["ranks"][1]["rank"] = 3; }, "expected a group of rank 3, got 0"},
      {[](json& f) { f["ranks"][0]["calls"] = 2; }, "expected at most 2 entries, got 4"},
      {[](json& f) { f["ranks"][0]["entries"][1]["group"] = 2; }, "as group, got 2"},
      {[](json& f) { f["ranks"][0]["entries"][1]["root"] = 2; }, "as root, got 2"},
      {[](json& f) { f["ranks"][0]["entries"][1]["state"] = "gone"; },
       "expected a state, got gone"},
      {[](json& f) { f["ranks"][0]["entries"][2]["seq"] = 0; }, "above 0, got 0"},
      {[](json& f) { f["ranks"][0]["entries"][3]["seq"] = 1; }, "above 1, got 1"},
      {[](json& f) { f["ranks"][0]["entries"][2]["onto_sum"] = 1; }, "true or false as onto_sum"},
      {[](json& f) { f["ranks"][0]["entries"][2].erase("op"); }, "expected op, got none"},
  };
  for (const Case& c : cases) {
    json spoiled = testing::parse_json(flight_json(sample(), "cause"));
    c.spoil(spoiled);
    const std::string path = folder.write("spoiled.json", testing::json_text(spoiled));
    EXPECT_TRUE(has(error_of<IoError>([&] { read_flight(path); }),
                    {"[flight] ", c.expected, "spoiled.json"}));
  }
  const std::string whole = flight_json(sample(), "cause");
  for (std::size_t n = 0; n + 2 < whole.size(); n += 7) {
    const std::string path = folder.write("cut.json", whole.substr(0, n));
    EXPECT_TRUE(has(error_of<IoError>([&] { read_flight(path); }), {"cut.json"})) << n;
  }
}

TEST(FlightFile, WhatIsNoRecordingIsToldByItsKind) {
  const TempFolder folder;
  const auto error = [&](const std::string& text) {
    const std::string path = folder.write("given", text);
    return error_of<IoError>([&] { read_flight(path); });
  };
  const std::string expected = "[flight] expected the flight.json that a run which failed leaves";
  EXPECT_TRUE(
      has(error("step 1/20 | loss 3"), {expected, "got a file of another kind (", "given"}));
  EXPECT_TRUE(
      has(error("\x1f\x8b\x08 packed"), {expected, "got a gzip file: unpack it: gunzip ("}));
  EXPECT_TRUE(has(error("<!DOCTYPE html>"), {expected, "got an HTML page: download the file"}));
  EXPECT_TRUE(has(error(""), {expected, "got an empty file ("}));
  // Of JSON the parser says where it breaks off, and nothing of itself.
  const std::string broken = error("{\"format\": ");
  EXPECT_TRUE(has(broken, {"[json] expected JSON, got parse error at line 1, column "}));
  EXPECT_TRUE(has(error("{}"), {"[flight] expected format, got none"}));
}

}  // namespace
}  // namespace tessera::tools
