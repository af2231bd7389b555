// What the page shows of a trace.
#include "tools/compare/trace_slices.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

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
    {"ph":"X","pid":0,"tid":0,"ts":100,"dur":4000,"name":"step 2"},
    {"ph":"X","pid":0,"tid":1,"ts":50,"dur":10,"name":"early"},
    {"ph":"X","pid":0,"tid":1,"ts":1100,"dur":2000,"name":"linear"},
    {"ph":"X","pid":0,"tid":2,"ts":600,"dur":500,"name":"all_gather"},
    {"ph":"C","pid":0,"ts":600,"name":"memory","args":{"x":1}},
    {"ph":"X","pid":1,"tid":1,"ts":1100,"dur":2000,"name":"of another rank"}]})");
  EXPECT_EQ(trace_slices(path, "zero3"), ordered_json::parse(R"({
    "name":"zero3", "duration_ms":4.0, "left_out":0, "threads":[
      {"name":"compute","slices":[[1.0,2.0,"linear"]]},
      {"name":"thread 2","slices":[[0.5,0.5,"all_gather"]]}]})"));
}

TEST(TraceSlices, OfManyTheLongestAreKept) {
  std::string events;
  for (int i = 0; i < 4000; ++i) {
    events += R"({"ph":"X","pid":0,"tid":1,"ts":)" + std::to_string(i) + R"(,"dur":)" +
              (i % 4 == 0 ? "0.1" : "0.5") + R"(,"name":"a"},)";
  }
  events.pop_back();
  const TempFolder folder;
  const ordered_json slices = trace_slices(folder.write("trace.json", "[" + events + "]"), "a");
  EXPECT_EQ(slices.at("left_out"), 1000);
  EXPECT_EQ(slices.at("threads")[0].at("slices").size(), 3000u);
  EXPECT_EQ(slices.at("threads")[0].at("slices")[0][1], 0.5 * 1e-3);
}

TEST(TraceSlices, ANumberThatIsNoIdIsNone) {
  const TempFolder folder;
  const std::string path =
      folder.write("trace.json", R"([{"ph":"X","pid":1,"tid":1e300,"ts":0,"dur":1,"name":"a"}])");
  EXPECT_EQ(trace_slices(path, "a").at("threads")[0].at("name"), "thread 0");
}

TEST(TraceSlices, WhatIsNoTraceIsRefused) {
  const TempFolder folder;
  for (const char* text : {"{}", "[]", "[1]", "{", R"([{"ph":"M","pid":1}])"}) {
    const std::string path = folder.write("trace.json", text);
    EXPECT_TRUE(has(error_of<engine::IoError>([&] { trace_slices(path, "a"); }), {"trace.json"}));
  }
}

}  // namespace
}  // namespace tessera::tools
