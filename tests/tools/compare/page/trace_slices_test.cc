// What the page shows of a trace.
#include "tools/compare/page/trace_slices.h"
#include "tests/testing/json.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;
using testing::error_of;
using testing::has;
using testing::TempFolder;

TEST(TraceSlices, AreThoseOfTheLastStepOfTheFirstProcess) {
  const TempFolder folder;
  const std::string path = folder.write("trace.json", R"({"traceEvents":[
    {"ph":"M","pid":0,"tid":1,"name":"thread_name","args":{"name":"compute"}},
    {"ph":"X","pid":0,"tid":0,"ts":0,"dur":100,"name":"step 1"},
    {"ph":"X","pid":0,"tid":0,"ts":400,"dur":3700,"name":"step 2"},
    {"ph":"X","pid":0,"tid":1,"ts":50,"dur":10,"name":"early"},
    {"ph":"X","pid":0,"tid":3,"ts":60,"dur":60,"name":"into the step"},
    {"ph":"M","pid":0,"tid":3,"name":"thread_sort_index","args":{"sort_index":-1}},
    {"ph":"X","pid":0,"tid":1,"ts":4100,"dur":5,"name":"late"},
    {"ph":"X","pid":0,"tid":1,"ts":1100,"dur":2000,"name":"linear"},
    {"ph":"X","pid":0,"tid":2,"ts":600,"dur":500,"name":"all_gather"},
    {"ph":"C","pid":0,"ts":600,"name":"memory","args":{"x":1}},
    {"ph":"C","pid":0,"ts":600,"name":"host memory optimizer","args":{"bytes":5}},
    {"ph":"X","pid":1,"tid":1,"ts":1100,"dur":2000,"name":"of another rank"}]})");
  EXPECT_EQ(step_of_trace_file(path, "zero3", {.max_points = 9}), testing::parse_ordered_json(R"({
    "name":"zero3", "duration_ms":4.0, "left_out":0, "slices":["into the step","all_gather","linear"], "threads":[
      {"name":"thread 3","slices":[[0.0,0.02,0]]},
      {"name":"compute","slices":[[1.0,2.0,2]]},
      {"name":"thread 2","slices":[[0.5,0.5,1]]}], "memory":null})"));
}

TEST(TraceSlices, OfManyTheLongestAreKept) {
  std::string events;
  for (int i = 0; i < 4000; ++i) {
    events += R"({"ph":"X","pid":0,"tid":1,"ts":)" + std::to_string(i) + R"(,"dur":)" +
              (i % 4 == 0 ? "0.1" : "0.5") + R"(,"name":"a"},)";
  }
  events.pop_back();
  const TempFolder folder;
  const ordered_json slices =
      step_of_trace_file(folder.write("trace.json", "[" + events + "]"), "a", {.max_points = 9});
  EXPECT_EQ(slices.at("left_out"), 2500);
  EXPECT_EQ(slices.at("threads")[0].at("slices").size(), 1500u);
  EXPECT_EQ(slices.at("threads")[0].at("slices")[0][1], 0.5 * 1e-3);
}

// From before the step to its end; what changes at one moment is one point.
TEST(TraceSlices, HaveTheCountersOfMemoryWithThem) {
  const TempFolder folder;
  const std::string path = folder.write("trace.json", R"([
    {"ph":"X","pid":1,"tid":0,"ts":0,"dur":100,"name":"step 1"},
    {"ph":"X","pid":1,"tid":0,"ts":100,"dur":4000,"name":"step 2"},
    {"ph":"X","pid":1,"tid":1,"ts":100,"dur":4000,"name":"linear"},
    {"ph":"C","pid":1,"ts":2100,"name":"memory activation","args":{"bytes":30}},
    {"ph":"C","pid":1,"ts":2100,"name":"memory total","args":{"bytes":37}},
    {"ph":"C","pid":1,"ts":50,"name":"memory optimizer","args":{"bytes":7}},
    {"ph":"C","pid":1,"ts":50,"name":"memory total","args":{"bytes":7}},
    {"ph":"C","pid":1,"ts":3100,"name":"memory activation","args":{"bytes":10}},
    {"ph":"C","pid":1,"ts":3100,"name":"memory total","args":{"bytes":17}},
    {"ph":"C","pid":1,"ts":4100,"name":"memory activation","args":{"bytes":0}},
    {"ph":"C","pid":1,"ts":4100,"name":"memory total","args":{"bytes":7}},
    {"ph":"C","pid":1,"ts":5000,"name":"memory total","args":{"bytes":99}},
    {"ph":"C","pid":2,"ts":3100,"name":"memory total","args":{"bytes":99}}])");
  EXPECT_EQ(step_of_trace_file(path, "a", {.max_points = 9}).at("memory"),
            testing::parse_ordered_json(R"({
    "ms":[0.0,2.0,3.0,4.0], "bytes":{"activation":[0,30,10,0],"optimizer":[7,7,7,7]},
    "total":[7,37,17,7]})"));
}

TEST(TraceSlices, OfManyMomentsTheMostMemoryStays) {
  std::string events = R"({"ph":"X","pid":0,"tid":1,"ts":0,"dur":5000,"name":"step 1"},
                          {"ph":"X","pid":0,"tid":2,"ts":0,"dur":5000,"name":"a"})";
  for (int i = 0; i < 5000; ++i) {
    events += R"(,{"ph":"C","pid":0,"ts":)" + std::to_string(i) +
              R"(,"name":"memory total","args":{"bytes":)" + std::to_string(i == 1234 ? 9000 : i) +
              "}}";
  }
  const TempFolder folder;
  const ordered_json memory =
      step_of_trace_file(folder.write("trace.json", "[" + events + "]"), "a", {.max_points = 50})
          .at("memory");
  EXPECT_LE(memory.at("ms").size(), 52u);
  EXPECT_GE(memory.at("ms").size(), 40u);
  EXPECT_EQ(std::ranges::count(memory.at("total").get<std::vector<int>>(), 9000), 1);
  EXPECT_EQ(memory.at("ms").front(), 0.0);
  EXPECT_EQ(memory.at("total").back(), 4999);
}

// Wherever in a stretch of those that are one point.
TEST(TraceSlices, NoPeakIsLeftOut) {
  const TempFolder folder;
  for (int peak = 0; peak < 60; ++peak) {
    std::string events = R"({"ph":"X","pid":0,"tid":1,"ts":0,"dur":60,"name":"step 1"},
                            {"ph":"X","pid":0,"tid":2,"ts":0,"dur":60,"name":"a"})";
    for (int i = 0; i < 60; ++i) {
      events += R"(,{"ph":"C","pid":0,"ts":)" + std::to_string(i) +
                R"(,"name":"memory total","args":{"bytes":)" + (i == peak ? "9" : "1") + "}}";
    }
    const ordered_json memory =
        step_of_trace_file(folder.write("trace.json", "[" + events + "]"), "a", {.max_points = 8})
            .at("memory");
    EXPECT_LE(memory.at("ms").size(), 10u);
    EXPECT_EQ(std::ranges::count(memory.at("total").get<std::vector<int>>(), 9), 1) << peak;
  }
}

TEST(TraceSlices, LongNamesAreCutBetweenCharacters) {
  const TempFolder folder;
  const auto shown = [&](const std::string& name) {
    const std::string path = folder.write(
        "trace.json", R"([{"ph":"X","pid":1,"tid":1,"ts":0,"dur":1,"name":")" + name + R"("}])");
    return step_of_trace_file(path, "a", {.max_points = 9}).at("slices")[0].get<std::string>();
  };
  const std::string x(58, 'x'), umlaut = "\xC3\xA4";
  EXPECT_EQ(shown(x + umlaut), x + umlaut);
  EXPECT_EQ(shown(x + umlaut + umlaut), x + umlaut + "...");
  EXPECT_EQ(shown(x + "y" + umlaut + umlaut), x + "y...");
}

TEST(TraceSlices, ANumberThatIsNoIdIsNone) {
  const TempFolder folder;
  const std::string path =
      folder.write("trace.json", R"([{"ph":"X","pid":1,"tid":1e300,"ts":0,"dur":1,"name":"a"}])");
  EXPECT_EQ(step_of_trace_file(path, "a", {.max_points = 9}).at("threads")[0].at("name"),
            "thread 0");
}

TEST(TraceSlices, WhatIsNoTraceIsRefused) {
  const TempFolder folder;
  for (const char* text : {"{}", "[]", "[1]", "{", R"([{"ph":"M","pid":1}])"}) {
    const std::string path = folder.write("trace.json", text);
    EXPECT_TRUE(
        has(error_of<engine::IoError>([&] { step_of_trace_file(path, "a", {.max_points = 9}); }),
            {"trace.json"}));
  }
}

}  // namespace
}  // namespace tessera::tools
