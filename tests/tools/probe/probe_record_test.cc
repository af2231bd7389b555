#include "tools/probe/probe_record.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"

namespace tessera::tools {
namespace {

using testing::error_of;
using testing::has;
using testing::TempFolder;

ProbePart part_of(const std::vector<float>& values, std::int64_t begin, int rank) {
  ProbePart part;
  part.key = {2, 0, ProbePhase::kReduced, "h.0.\"weight\"\n"};
  part.unit = "h.0";
  part.rank = rank;
  part.order = 7;
  part.shape = {2, 3};
  part.begin = begin;
  part.dtype = "f32";
  part.checksum = checksum_of(values, begin);
  part.values = values;
  return part;
}

const ProbeHeader kHeader{.ranks = 2,
                          .accum = 3,
                          .batch = 4,
                          .first_step = 2,
                          .reduces_last = true,
                          .options = {{"train.seed", "7"}, {"data.path", "\"/a \\\"b\\\"\""}},
                          .data_digest = "9 tokens 0a",
                          .arithmetic = {{"cpu", "\"A \\\"B\\\"\""}, {"threads", "2"}}};

std::string record() {
  return header_text(kHeader) + part_text(part_of({1, -2, 0.1f, 4}, 0, 0)) +
         part_text(part_of({std::numeric_limits<float>::quiet_NaN(), -0.0f}, 4, 1)) +
         end_text(2, 2);
}

TEST(ProbeRecord, ReadsBackWhatWasWritten) {
  const TempFolder folder;
  const ProbeRun run = read_probe_run(folder.write("a.jsonl", record()));
  EXPECT_EQ(run.header.ranks, 2);
  EXPECT_EQ(run.header.accum, 3);
  EXPECT_EQ(run.header.batch, 4);
  EXPECT_EQ(run.header.first_step, 2);
  EXPECT_TRUE(run.header.reduces_last);
  EXPECT_EQ(run.header.options, kHeader.options);
  EXPECT_EQ(run.header.data_digest, kHeader.data_digest);
  EXPECT_EQ(run.header.arithmetic, kHeader.arithmetic);
  EXPECT_EQ(run.last_step, 2);
  ASSERT_EQ(run.parts.size(), 2u);
  const ProbePart want = part_of({1, -2, 0.1f, 4}, 0, 0), &got = run.parts[0];
  EXPECT_EQ(got.key, want.key);
  EXPECT_EQ(got.unit, want.unit);
  EXPECT_EQ(got.order, want.order);
  EXPECT_EQ(got.shape, want.shape);
  EXPECT_EQ(got.dtype, want.dtype);
  EXPECT_EQ(got.checksum.hash, want.checksum.hash);
  EXPECT_EQ(got.checksum.numel, 4);
  EXPECT_EQ(got.checksum.max_abs, 4);
  EXPECT_EQ(got.checksum.sum, want.checksum.sum);
  EXPECT_EQ(got.values, want.values);
  EXPECT_EQ(run.parts[1].rank, 1);
  EXPECT_EQ(run.parts[1].begin, 4);
  EXPECT_TRUE(std::isnan(run.parts[1].checksum.max_abs));
  EXPECT_TRUE(std::isnan(run.parts[1].values[0]));
  EXPECT_TRUE(std::signbit(run.parts[1].values[1]));
  // Of an older one.
  std::string old = record();
  const std::size_t at = old.find(",\"data_digest\""), end = old.find("}\n", at);
  old.erase(at, end - at);
  const ProbeHeader header = read_probe_run(folder.write("old.jsonl", old)).header;
  EXPECT_EQ(header.options, kHeader.options);
  EXPECT_EQ(header.data_digest, "");
  EXPECT_TRUE(header.arithmetic.empty());
}

TEST(ProbeRecord, AnInfinityReadsBackAsOne) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const TempFolder folder;
  for (const float x : {kInfinity, -kInfinity}) {
    const std::string text =
        header_text(kHeader) + part_text(part_of({1, x}, 0, 0)) + end_text(2, 1);
    const ProbeRun run = read_probe_run(folder.write("a.jsonl", text));
    EXPECT_EQ(run.parts[0].checksum.max_abs, double{kInfinity});
    EXPECT_EQ(run.parts[0].checksum.sum, double{x});
  }
}

TEST(ProbeRecord, OfLongTensorsTheValuesTakeSeveralLines) {
  std::vector<float> values(200'000);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  ProbePart part = part_of(values, 0, 0);
  part.shape = {200'000};
  const TempFolder folder;
  const std::string text = header_text(kHeader) + part_text(part) + end_text(2, 1);
  EXPECT_EQ(read_probe_run(folder.write("a.jsonl", text)).parts[0].values, values);
}

TEST(ProbeRecord, StepsThatSomeRankHasNotEndedAreLeftOut) {
  ProbePart ahead = part_of({}, 0, 0);
  ahead.key.step = 3;
  const TempFolder folder;
  const std::string text =
      header_text(kHeader) + part_text(part_of({1, 2}, 0, 0)) + part_text(ahead) + end_text(2, 2);
  EXPECT_EQ(read_probe_run(folder.write("a.jsonl", text)).parts.size(), 1u);
}

TEST(ProbeRecord, AnUnfinishedStepIsKept) {
  ProbePart next = part_of({}, 0, 0), ahead = part_of({}, 0, 0);
  next.key.step = 3;
  ahead.key.step = 4;
  const TempFolder folder;
  const std::string text =
      header_text(kHeader) + part_text(part_of({1, 2}, 0, 0)) + part_text(next) + part_text(ahead);
  const ProbeRun run = read_probe_run(folder.write("a.jsonl", text + end_text(2, 3, 3)));
  EXPECT_EQ(run.last_step, 3);
  EXPECT_TRUE(run.is_unfinished);
  EXPECT_EQ(run.parts.size(), 2u);
  const std::string path = folder.write("a.jsonl", text + end_text(2, 3, 4));
  EXPECT_TRUE(has(error_of<engine::IoError>([&] { read_probe_run(path); }),
                  {path + ":6", "expected step 3 as the unfinished one"}));
}

TEST(ProbeRecord, WhatCannotBeIsRefusedByFileAndLine) {
  const TempFolder folder;
  const auto refused = [&](std::string text, const char* line, const std::string& words) {
    const std::string path = folder.write("bad.jsonl", text);
    const std::string message = error_of<engine::IoError>([&] { read_probe_run(path); });
    EXPECT_TRUE(has(message, {path + line, words})) << text;
  };
  const auto with = [](const std::string& from, const std::string& to) {
    std::string text = record();
    const std::size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.replace(at, from.size(), to);
  };
  refused("", "", "cut short, or none");
  refused("{}\n", ":1", "expected a record of --log.probe, got none");
  refused("[]\n", ":1", "expected an object, got array");
  refused("{\"probe\":2}\n", ":1", "expected a count as probe, got 2");
  refused(with("\"ranks\":2", "\"ranks\":0"), ":1", "ranks and accum of at least 1");
  refused(with("\"phase\":\"reduced\"", "\"phase\":\"redoced\""), ":2", "got redoced");
  refused(with("\"step\":2", "\"step\":-2"), ":2", "a count as step, got -2");
  refused(with("\"rank\":0", "\"rank\":2"), ":2", "a count as rank, got 2");
  refused(with("\"shape\":[2,3]", "\"shape\":[2,9999999999999999]"), ":2", "shape");
  refused(with("\"shape\":[2,3]", "\"shape\":[1,1,1,1,1,1]"), ":2", "dimensions as shape");
  refused(with("\"begin\":0", "\"begin\":4"), ":2", "a part of 6 elements, got 4 from 4 on");
  refused(with("\"hash\":\"", "\"hash\":\"x"), ":2", "16 hex digits as hash");
  refused(with("\"sum\":", "\"som\":"), ":2", "expected sum, got none");
  refused(with("\"sum\":", "\"sum\":\"infinite\",\"som\":"), ":2", "expected a number as sum");
  refused(with("\"values\":\"3f", "\"values\":\"+f"), ":3", "8 hex digits an element");
  refused(with("\"values\":\"3f800000", "\"values\":\""), "", "expected 4 values of");
  refused(with("\"values\":\"3f8", "\"values\":\"3f8000003f8"), ":3",
          "expected 4 values, got more");
  refused(with("\"num_parts\":2", "\"num_parts\":3"), "", "expected the 3 parts");
  refused(with("\"rank\":1", "\"rank\":0").replace(record().find("\"begin\":4"), 9, "\"begin\":0"),
          "", "twice");
  const std::string whole = record();
  refused(whole.substr(0, whole.size() - 1), ":6", "half a line");
  refused(whole.substr(0, whole.find("{\"end\"")), "", "cut short");
  refused(whole + whole, ":7", "got more");
}

// Of a process with one of two ranks, that has ended `last_step` and has a part of the next if
// `is_ahead`.
std::string record_of_process(int rank, std::int64_t last_step, bool is_ahead,
                              const std::string& run = "ab") {
  ProbeHeader header = kHeader;
  header.first_rank = rank;
  header.local_ranks = 1;
  header.run = run;
  std::string text = header_text(header);
  const std::int64_t newest = last_step + (is_ahead ? 1 : 0);
  for (std::int64_t step = 2; step <= newest; ++step) {
    ProbePart part = part_of({1, 2, 3}, 3 * rank, rank);
    part.key.step = step;
    text += part_text(part);
  }
  return text + end_text(last_step, newest - 1, is_ahead ? newest : 0);
}

TEST(ProbeRecord, OfProcessesIsWhatAllOfThemHave) {
  const TempFolder folder;
  const std::string path = folder.write("a.jsonl", record_of_process(0, 3, false));
  const auto with = [&](const std::string& other) {
    folder.write("a.rank1.jsonl", other);
    return read_probe_run(path);
  };
  const ProbeRun whole = with(record_of_process(1, 3, false));
  EXPECT_EQ(whole.last_step, 3);
  EXPECT_FALSE(whole.is_unfinished);
  ASSERT_EQ(whole.parts.size(), 4u);
  EXPECT_EQ(whole.parts[0].rank, 0);
  EXPECT_EQ(whole.parts[3].rank, 1);
  EXPECT_EQ(whole.header.local_ranks, 2);
  const auto unfinished = [&](std::int64_t last_step, bool is_ahead) {
    const ProbeRun run = with(record_of_process(1, last_step, is_ahead));
    EXPECT_TRUE(run.is_unfinished);
    return std::pair(run.last_step, run.parts.size());
  };
  // The step that one has not ended is the last, and what another has of a later one goes.
  EXPECT_EQ(unfinished(3, true), std::pair(std::int64_t{4}, std::size_t{5}));
  EXPECT_EQ(unfinished(2, true), std::pair(std::int64_t{3}, std::size_t{4}));
  EXPECT_EQ(unfinished(2, false), std::pair(std::int64_t{3}, std::size_t{3}));
  EXPECT_EQ(unfinished(1, true), std::pair(std::int64_t{2}, std::size_t{2}));
}

TEST(ProbeRecord, ProcessesOfOneRunAloneAreReadTogether) {
  const TempFolder folder;
  const std::string path = folder.write("a.jsonl", record_of_process(0, 3, false));
  const auto error = [&](const std::string& file) {
    return error_of<engine::IoError>([&] { read_probe_run(file); });
  };
  const std::string other = folder / "a.rank1.jsonl";
  EXPECT_TRUE(has(error(path), {"expected the records of all 2 ranks in one folder, got none of "
                                "rank 1: its process has left none",
                                other}));
  folder.write("a.rank1.jsonl", record_of_process(1, 3, false, "cd"));
  EXPECT_TRUE(
      has(error(path), {"the record of rank 1 in the run of " + path + ", got another", other}));
  folder.write("a.rank1.jsonl", record_of_process(0, 3, false));
  EXPECT_TRUE(has(error(path), {"the record of rank 1 in the run of ", other}));
  folder.write("a.rank1.jsonl", record_of_process(1, 3, false));
  EXPECT_TRUE(has(error(other), {"expected the record of rank 0's process", "got that of rank 1"}));
  std::string stranger = record_of_process(1, 3, false);
  stranger.replace(stranger.find("\"rank\":1"), 8, "\"rank\":0");
  folder.write("a.rank1.jsonl", stranger);
  EXPECT_TRUE(has(error(path), {other + ":2", "expected a part of ranks 1 to 1, got one of 0"}));
}

TEST(ProbeRecord, TargetsReadBack) {
  const ProbeKey key{0, 3, ProbePhase::kOutputGradient, "a:b.output 2", 4};
  EXPECT_EQ(target_text(key), "output_gradient:3:4:a:b.output 2");
  EXPECT_EQ(parse_target(target_text(key)), key);
  const auto error = [](const char* text) {
    return error_of<engine::InvalidArgument>([&] { parse_target(text); });
  };
  EXPECT_TRUE(has(error("gradient:1:1"), {"PHASE:MICRO_BATCH:VISIT:TENSOR, got gradient:1:1"}));
  EXPECT_TRUE(has(error("gradient:1:1:"), {"PHASE:MICRO_BATCH:VISIT:TENSOR"}));
  EXPECT_TRUE(has(error("gradient:one:1:x"), {"PHASE:MICRO_BATCH:VISIT:TENSOR"}));
  EXPECT_TRUE(has(error("gradients:1:1:x"), {"gathered_forward, output", "got gradients"}));
}

}  // namespace
}  // namespace tessera::tools
