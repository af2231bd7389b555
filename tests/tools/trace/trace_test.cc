// The recorder, told of launches by hand.
#include "tools/trace/trace.h"
#include "tests/testing/json.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "engine/error.h"
#include "engine/tensor.h"
#include "tests/testing/errors.h"
#include "tests/tools/trace/trace_file.h"

namespace tessera::tools {
namespace {

using engine::Scope;
using engine::Work;
using testing::TraceFile;
using testing::TraceSlice;

/// A recorder and what it wrote. Times are in microseconds.
class Trace {
 public:
  explicit Trace(TraceOptions options = {}) : recorder(writer_, std::move(options)) {}

  /// Launched, to run later.
  std::optional<std::uint64_t> enqueue(const std::string& stream, const Work& work,
                                       Scope scope = {}) {
    return recorder.on_enqueue({work, stream, scope});
  }
  void tell(std::optional<std::uint64_t> ticket, const std::string& stream, const Work& work,
            std::int64_t begin, std::int64_t end) {
    ASSERT_TRUE(ticket) << work.name;
    recorder.on_launch({work, stream, begin * 1000, end * 1000, *ticket});
  }
  void launch(const std::string& stream, const Work& work, std::int64_t begin, std::int64_t end,
              Scope scope = {}) {
    tell(enqueue(stream, work, scope), stream, work, begin, end);
  }
  void compute(const char* block, const char* phase, std::int64_t begin, std::int64_t end) {
    launch("compute", {.name = "op"}, begin, end, {block, phase});
  }
  void gather(const std::string& label, std::int64_t begin, std::int64_t end) {
    launch("gather", {.name = "all_gather", .detail = label}, begin, end);
  }
  void reduce(const std::string& label, std::int64_t begin, std::int64_t end) {
    launch("reduce", {.name = "reduce_scatter", .detail = label}, begin, end);
  }

  TraceFile end(std::int64_t slack_ns = 0) {
    recorder.finish();
    writer_.close();
    return TraceFile(text_, slack_ns);
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
  TraceWriter writer_{[this](const std::string& text) { text_ += text; }};

 public:
  TraceRecorder recorder;
};

std::vector<std::string> names_of(const std::vector<TraceSlice>& slices) {
  std::vector<std::string> names;
  for (const TraceSlice& s : slices) names.push_back(s.name);
  return names;
}

using Names = std::vector<std::string>;

TEST(Trace, IsEmptyWithoutLaunches) {
  Trace nothing;
  nothing.end();
  EXPECT_EQ(nothing.text(), "[]\n");
  Trace trace;
  trace.recorder.begin_step(1);
  trace.recorder.end_step();
  trace.end();
  EXPECT_EQ(trace.text(), "[]\n");
  ASSERT_EQ(trace.recorder.overlaps().size(), 1u);
  EXPECT_EQ(trace.recorder.overlaps()[0].overlap.comm.comm_ms, 0);
}

TEST(Trace, ShowsALaunchWithItsWork) {
  Trace trace({.process = 3, .process_name = "rank 3", .start_ns = 500});
  trace.recorder.begin_step(7);
  trace.launch("compute",
               {.name = "linear.forward",
                .flops = 6e9,
                .bytes_read = 10,
                .bytes_written = 20,
                .detail = "h.0.w"},
               1, 3, {"h.0", "forward"});
  trace.recorder.end_step();
  const TraceFile file = trace.end();
  EXPECT_EQ(file.processes, (std::map<int, std::string>{{4, "rank 3"}}));
  const std::vector<TraceSlice> slices = file.of_thread("compute", 4);
  ASSERT_EQ(slices.size(), 1u);
  EXPECT_EQ(slices[0].name, "linear.forward h.0.w");
  EXPECT_EQ(slices[0].category, "compute");
  EXPECT_EQ(slices[0].begin_ns, 500);
  EXPECT_EQ(slices[0].end_ns, 2500);
  EXPECT_EQ(slices[0].args,
            testing::parse_json(
                R"({"op":"linear.forward","unit":"h.0","phase":"forward","detail":"h.0.w",)"
                R"("flops":6e9,"bytes_read":10,"bytes_written":20})"));
  EXPECT_EQ(names_of(file.of_thread("units", 4)), Names{"h.0 forward"});
  EXPECT_EQ(names_of(file.of_thread("steps", 4)), Names{"step 7"});
}

TEST(Trace, WhatWasBeforeTheStartHasTimesBelowZero) {
  Trace trace({.start_ns = 3'500});
  trace.recorder.begin_step(1);
  trace.launch("compute", {.name = "op"}, 1, 2);
  trace.launch("compute", {.name = "op"}, 3, 4);
  trace.recorder.end_step();
  const std::vector<TraceSlice> slices = trace.end().of_thread("compute", 1);
  ASSERT_EQ(slices.size(), 2u);
  EXPECT_EQ(slices[0].begin_ns, -2'500);
  EXPECT_EQ(slices[0].end_ns, -1'500);
  EXPECT_EQ(slices[1].begin_ns, -500);
  EXPECT_EQ(slices[1].end_ns, 500);
}

TEST(Trace, TakesAnyTextAsAName) {
  const std::string odd = "a\"b\\c\n\x01 </script> \xC3\xA4 \xFF";
  Trace trace({.process_name = odd});
  trace.recorder.add_unit(odd, {odd});
  trace.recorder.begin_step(1);
  trace.launch(odd, {.name = "op", .detail = odd}, 0, 1, {odd, "forward"});
  trace.recorder.end_step();
  const TraceFile file = trace.end();
  ASSERT_EQ(file.slices.size(), 1u);
  const std::string shown = "a\"b\\c\n\x01 </script> \xC3\xA4 \xEF\xBF\xBD";
  EXPECT_EQ(file.slices[0].name, "op " + shown);
  EXPECT_EQ(file.slices[0].arg("unit"), shown);
  EXPECT_EQ(file.processes.begin()->second, shown);
  EXPECT_EQ(file.threads.begin()->second, shown);
}

TEST(Trace, RecordsStepsThatAreAskedForAlone) {
  Trace trace({.first_step = 2, .last_step = 3});
  EXPECT_FALSE(trace.enqueue("compute", {.name = "before"}));
  for (int step = 1; step <= 4; ++step) {
    trace.recorder.begin_step(step);
    const bool is_recorded = step == 2 || step == 3;
    const auto ticket = trace.enqueue("compute", {.name = "op"});
    EXPECT_EQ(ticket.has_value(), is_recorded) << step;
    if (ticket) trace.tell(ticket, "compute", {.name = "op"}, step * 10, step * 10 + 1);
    trace.recorder.end_step();
    EXPECT_FALSE(trace.enqueue("compute", {.name = "between"}));
    // A stream that does not ask.
    trace.recorder.on_launch({Work{.name = "between"}, "compute", 0, 1});
  }
  const TraceFile file = trace.end();
  EXPECT_EQ(names_of(file.of_category("compute")), (Names{"op", "op"}));
  EXPECT_EQ(names_of(file.of_category("step")), (Names{"step 2", "step 3"}));
}

TEST(Trace, RefusesStepsOutOfOrder) {
  Trace trace;
  trace.recorder.begin_step(4);
  trace.recorder.end_step();
  EXPECT_TRUE(testing::has(
      testing::error_of<engine::InvalidArgument>([&] { trace.recorder.begin_step(4); }),
      {"[trace] expected a step after 4, got 4", "rank 0"}));
}

TEST(Arrows, LeadFromAGatherToTheFirstUseOfItsUnit) {
  Trace trace;
  trace.recorder.add_unit("h.0..h.1", {"h.0", "h.1"});
  trace.recorder.add_unit("h.2", {"h.2"});
  trace.recorder.begin_step(1);
  trace.gather("h.0..h.1 forward", 0, 10);
  trace.gather("h.2 forward", 10, 18);
  trace.launch("compute", {.name = "loss"}, 5, 6);  // of no region
  trace.compute("root", "forward", 8, 9);
  trace.compute("h.1", "forward", 12, 13);
  trace.compute("h.0", "forward", 13, 14);
  trace.compute("h.2", "forward", 20, 22);
  trace.compute("h.2", "backward", 22, 23);
  trace.gather("h.2 backward", 23, 25);
  trace.compute("h.2", "backward", 26, 27);
  trace.gather("values", 30, 31);  // of no unit
  trace.recorder.end_step();
  const TraceFile file = trace.end();
  ASSERT_EQ(file.arrows.size(), 3u);
  std::map<std::string, std::pair<std::string, std::int64_t>> uses;
  for (const TraceFile::Arrow& arrow : file.arrows) {
    ASSERT_TRUE(arrow.from != nullptr && arrow.to != nullptr);
    EXPECT_EQ(arrow.name, "gathered");
    EXPECT_EQ(arrow.from->arg("unit"), arrow.to->arg("unit"));
    uses[arrow.from->name] = {arrow.to->arg("unit"), arrow.to->begin_ns / 1000};
  }
  EXPECT_EQ(uses, (std::map<std::string, std::pair<std::string, std::int64_t>>{
                      {"all_gather h.0..h.1 forward", {"h.0..h.1", 12}},
                      {"all_gather h.2 forward", {"h.2", 20}},
                      {"all_gather h.2 backward", {"h.2", 26}}}));
  EXPECT_EQ(file.expect_gathers_lead_to_uses(), 3);
}

TEST(Arrows, LeadFromAGradientToItsReduction) {
  Trace trace;
  trace.recorder.begin_step(1);
  for (const std::int64_t t : {0, 100}) {  // two micro-steps
    trace.compute("h.0", "backward", t, t + 1);
    trace.compute("h.0", "backward", t + 2, t + 5);
    trace.launch("reduce", {.name = "cast", .detail = "h.0 gradient"}, t + 6, t + 7);
    trace.reduce("h.0 gradient", t + 7, t + 9);
  }
  trace.recorder.end_step();
  const TraceFile file = trace.end();
  ASSERT_EQ(file.arrows.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) {
    const TraceFile::Arrow& arrow = file.arrows[i];
    EXPECT_EQ(arrow.name, "gradient");
    EXPECT_EQ(arrow.from->begin_ns, (i == 0 ? 2 : 102) * 1000);
    EXPECT_EQ(arrow.to->name, "cast h.0 gradient");
  }
}

TEST(Arrows, CrossStepsAndForgetWhatNobodyUses) {
  Trace trace;
  trace.recorder.begin_step(1);
  trace.gather("root forward", 0, 1);
  trace.gather("unused forward", 1, 2);
  trace.recorder.end_step();
  trace.recorder.begin_step(2);
  trace.compute("root", "forward", 2, 3);
  trace.recorder.end_step();
  trace.recorder.begin_step(3);
  trace.compute("unused", "forward", 4, 5);  // with what another gather brought, if any
  trace.recorder.end_step();
  const TraceFile file = trace.end();
  ASSERT_EQ(file.arrows.size(), 1u);
  EXPECT_EQ(file.arrows[0].from->name, "all_gather root forward");
}

TEST(Trace, OfAGpuIsToldLateAndStreamByStream) {
  Trace trace;
  const Work gather{.name = "all_gather", .detail = "h.0 forward"}, op{.name = "op"},
      reduce{.name = "reduce_scatter", .detail = "h.0 gradient"};
  trace.recorder.begin_step(1);
  const auto gathered = trace.enqueue("gather", gather);
  const auto computed = trace.enqueue("compute", op, {"h.0", "forward"});
  const auto reduced = trace.enqueue("reduce", reduce);
  trace.recorder.end_step();
  EXPECT_EQ(trace.text(), "");
  trace.recorder.begin_step(2);
  const auto next = trace.enqueue("compute", op, {"h.0", "forward"});
  trace.tell(computed, "compute", op, 20, 30);
  trace.recorder.end_step();
  EXPECT_TRUE(testing::has(trace.text(), {R"("name":"op")"}));
  EXPECT_TRUE(trace.recorder.overlaps().empty());
  trace.tell(reduced, "reduce", reduce, 30, 50);
  trace.tell(next, "compute", op, 35, 45);
  trace.tell(gathered, "gather", gather, 0, 25);
  const TraceFile file = trace.end(/*slack_ns=*/10'000);
  ASSERT_EQ(file.arrows.size(), 2u);
  EXPECT_EQ(file.expect_gathers_lead_to_uses(), 1);
  const std::vector<StepOverlap> overlaps = trace.recorder.overlaps();
  ASSERT_EQ(overlaps.size(), 2u);
  // Of the first step 25 + 20 us are sent, 10 us of the reduction after the second step's launch
  // and 5 us of the gather after its own.
  const Overlap& first = overlaps[0].overlap;
  EXPECT_DOUBLE_EQ(first.comm.comm_ms, 45e-3);
  EXPECT_DOUBLE_EQ(first.comm.hidden_ms, 15e-3);
  EXPECT_DOUBLE_EQ(first.kinds.at("parameters").hidden_ms, 5e-3);
  EXPECT_DOUBLE_EQ(first.kinds.at("gradients").exposed_ms, 10e-3);
  EXPECT_DOUBLE_EQ(first.compute_ms, 10e-3);
  EXPECT_EQ(overlaps[1].overlap.comm.comm_ms, 0);
}

TEST(Trace, CountsCommunicationByWhatIsSent) {
  Trace trace;
  trace.recorder.begin_step(1);
  trace.gather("h.0 forward", 0, 10);
  trace.reduce("h.0 gradient", 20, 30);
  trace.launch("fetch", {.name = "fetch"}, 40, 50);
  trace.launch("compute", {.name = "all_reduce", .detail = "norm"}, 60, 70);
  trace.launch("host", {.name = "optimizer"}, 0, 100);       // hides nothing
  trace.launch("reduce", {.name = "cast"}, 30, 35);          // is none, and hides nothing
  trace.launch("optimizer", {.name = "optimizer"}, 45, 65);  // hides
  trace.recorder.end_step();
  trace.end();
  const Overlap overlap = trace.recorder.overlaps().at(0).overlap;
  std::map<std::string, double> exposed_us;
  for (const auto& [kind, times] : overlap.kinds) exposed_us[kind] = times.exposed_ms * 1e3;
  EXPECT_EQ(exposed_us.size(), 4u);
  EXPECT_NEAR(exposed_us["parameters"], 10, 1e-9);
  EXPECT_NEAR(exposed_us["gradients"], 10, 1e-9);
  EXPECT_NEAR(exposed_us["offload"], 5, 1e-9);
  EXPECT_NEAR(exposed_us["other"], 5, 1e-9);
}

// A gather that is sent ahead runs during the end of the step before; a reduction that is late runs
// during the begin of the next.
TEST(Trace, WhatTheNeighboursOfAStepComputeHidesWhatItSends) {
  Trace trace;
  trace.recorder.begin_step(1);
  trace.compute("h.0", "forward", 0, 10);
  trace.recorder.end_step();
  trace.recorder.begin_step(2);
  trace.gather("h.0 forward", 4, 20);
  trace.compute("h.0", "forward", 20, 30);
  trace.reduce("h.0 gradient", 30, 45);
  trace.recorder.end_step();
  trace.recorder.begin_step(3);
  trace.compute("h.0", "forward", 40, 50);
  trace.recorder.end_step();
  trace.end(/*slack_ns=*/20'000);
  const std::vector<StepOverlap> overlaps = trace.recorder.overlaps();
  ASSERT_EQ(overlaps.size(), 3u);
  const Overlap& middle = overlaps[1].overlap;
  EXPECT_DOUBLE_EQ(middle.kinds.at("parameters").hidden_ms, 6e-3) << "by step 1";
  EXPECT_DOUBLE_EQ(middle.kinds.at("parameters").exposed_ms, 10e-3);
  EXPECT_DOUBLE_EQ(middle.kinds.at("gradients").hidden_ms, 5e-3) << "by step 3";
  EXPECT_DOUBLE_EQ(middle.kinds.at("gradients").exposed_ms, 10e-3);
  EXPECT_DOUBLE_EQ(middle.comm.comm_ms, 31e-3);
  EXPECT_DOUBLE_EQ(middle.comm.hidden_ms, 11e-3);
}

TEST(Trace, TakesStreamsThatDoNotAsk) {
  Trace trace;
  trace.recorder.begin_step(1);
  for (int i = 0; i < 3; ++i) {
    const Work work{.name = "all_gather", .detail = "h.0 forward"};
    trace.recorder.on_launch({work, "gather", i * 10, i * 10 + 5});
  }
  trace.recorder.end_step();
  const TraceFile file = trace.end();
  EXPECT_EQ(file.of_thread("gather", 1).size(), 3u);
  EXPECT_DOUBLE_EQ(trace.recorder.overlaps().at(0).overlap.comm.comm_ms, 15e-6);
}

TEST(Trace, GivesStreamsOfOneNameAThreadEach) {
  Trace trace;
  trace.recorder.begin_step(1);
  trace.gather("a forward", 0, 10);
  trace.gather("b forward", 5, 15);
  trace.gather("a forward", 10, 20);
  trace.recorder.end_step();
  const TraceFile file = trace.end();
  file.expect_threads_in_turn();
  EXPECT_EQ(file.of_thread("gather", 1).size(), 2u);
  EXPECT_EQ(file.of_thread("gather (2)", 1).size(), 1u);
}

TEST(Trace, CountsMemoryAsTheBooksDo) {
  using engine::Category;
  Trace trace;
  engine::Memory device, pinned;
  trace.recorder.count_memory("memory", device);
  trace.recorder.count_memory("host memory", pinned);
  const auto tensor = [](const engine::Memory& memory, std::int64_t numel, Category category) {
    return engine::Tensor::empty(memory, {numel}, engine::DType::kF32, "t", category);
  };
  const auto shard = tensor(device, 1000, Category::kParameterShard);
  trace.recorder.begin_step(1);
  {
    const auto a = tensor(device, 100, Category::kActivation);
    trace.compute("h.0", "forward", 0, 1);
    const auto b = tensor(device, 200, Category::kActivation);
    const auto m = tensor(pinned, 50, Category::kOptimizer);
    {
      const auto staging = tensor(device, 10, Category::kCommunication);
      trace.gather("h.0 forward", 0, 5);
    }
    trace.compute("h.0", "forward", 2, 3);
    trace.compute("h.0", "forward", 3, 4);  // nothing new
  }
  trace.recorder.end_step();
  const TraceFile file = trace.end();
  std::vector<std::tuple<std::int64_t, std::string, std::int64_t>> seen;
  for (const auto& c : file.counters) seen.emplace_back(c.ns / 1000, c.name, c.nbytes);
  // What was there when the gather was launched is shown at the end of the launch before.
  const std::vector<std::tuple<std::int64_t, std::string, std::int64_t>> expected = {
      {0, "memory parameter_shard", 4000}, {0, "memory activation", 400},
      {0, "memory total", 4400},           {1, "memory activation", 1200},
      {1, "memory communication", 40},     {1, "memory total", 5240},
      {1, "host memory optimizer", 200},   {1, "host memory total", 200},
      {2, "memory communication", 0},      {2, "memory total", 5200},
      {4, "memory activation", 0},         {4, "memory total", 4000},
      {4, "host memory optimizer", 0},     {4, "host memory total", 0}};
  EXPECT_EQ(seen, expected);
  const nlohmann::json peaks = file.of_category("step").at(0).args.at("peak_bytes");
  EXPECT_EQ(peaks.at("memory").at("activation"), 1200);
  EXPECT_EQ(peaks.at("memory").at("total"), 5240);
  EXPECT_EQ(peaks.at("host memory").at("optimizer"), 200);
}

TEST(Trace, PutsRecordersOfSeveralThreadsTogether) {
  std::string text;
  TraceWriter writer([&](const std::string& more) { text += more; });
  std::deque<TraceRecorder> recorders;
  for (int rank = 0; rank < 4; ++rank) {
    recorders.emplace_back(writer,
                           TraceOptions{.process = rank, .process_name = std::to_string(rank)});
  }
  std::vector<std::thread> threads;
  for (TraceRecorder& recorder : recorders) {
    threads.emplace_back([&recorder] {
      const engine::Stream compute = engine::Stream::inline_cpu("compute", {.listener = &recorder});
      const engine::Stream comm = compute.sibling("gather", {.listener = &recorder});
      for (int step = 1; step <= 20; ++step) {
        recorder.begin_step(step);
        comm.launch({.name = "all_gather", .detail = "u forward"}, [] {});
        compute.wait(comm.record("gathered"));
        compute.push_scope({"u", "forward"});
        compute.launch({.name = "op"}, [] {});
        compute.pop_scope();
        recorder.end_step();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (TraceRecorder& recorder : recorders) recorder.finish();
  writer.close();
  const TraceFile file(text);
  file.expect_threads_in_turn();
  EXPECT_EQ(file.processes.size(), 4u);
  EXPECT_EQ(file.of_category("compute").size(), 80u);
  EXPECT_EQ(file.of_category("step").size(), 80u);
  EXPECT_EQ(file.expect_gathers_lead_to_uses(), 80);
}

// What a killed run leaves: a reader closes the list itself.
TEST(Trace, IsWholeEventsAtAnyTime) {
  Trace trace;
  for (int step = 1; step <= 3; ++step) {
    trace.recorder.begin_step(step);
    trace.compute("h.0", "forward", step * 10, step * 10 + 1);
    trace.recorder.end_step();
    const TraceFile so_far(trace.text() + "]");
    EXPECT_EQ(so_far.of_category("compute").size(), static_cast<std::size_t>(step));
  }
}

}  // namespace
}  // namespace tessera::tools
