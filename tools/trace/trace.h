// A trace of what ran when: launch records of the streams of a rank become a Chrome trace, which
// Perfetto (https://ui.perfetto.dev) opens. It needs no trainer:
//
//   std::ofstream file("trace.json");
//   TraceWriter writer([&](std::string text) { file << text; });
//   TraceRecorder trace(writer, {.process = rank, .process_name = "rank 0"});
//   Stream compute = Stream::inline_cpu("compute", {.listener = &trace});
//   Fsdp fsdp(world, memory, compute, ..., {.listener = &trace});
//   trace.count_memory("memory", memory);
//   for (const auto& unit : fsdp.units()) trace.add_unit(unit->name(), <names of unit->blocks()>);
//   for (int step = 1; step <= 5; ++step) {
//     trace.begin_step(step);
//     ...
//     trace.end_step();
//   }
//   ...                    // the streams are gone
//   trace.finish();
//   writer.close();
//
// docs/trace.md says what is to be seen in it.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/memory.h"
#include "engine/stream.h"
#include "tools/trace/overlap.h"
#include "tools/trace/trace_events.h"
#include "tools/trace/trace_flows.h"
#include "tools/trace/trace_memory.h"

namespace tessera::tools {

struct TraceOptions {
  int process = 0;  ///< from 0; no other recorder's of the writer
  std::string process_name = "rank 0";
  std::int64_t start_ns = 0;  ///< what the streams' clock shows at the trace's 0
  std::int64_t first_step = 1, last_step = std::numeric_limits<std::int64_t>::max();  ///< recorded
};

struct StepOverlap {
  std::int64_t step;
  Overlap overlap;
};

/// Records of any streams with one clock; a stream that asks on_enqueue() beforehand is told in any
/// order and at any time, of another one the records are taken in the order in which they come.
/// Thread-safe, but steps are begun and ended, and units and memories added, by one thread.
class TraceRecorder final : public engine::LaunchListener {
 public:
  /// `writer` outlives this.
  TraceRecorder(TraceWriter& writer, TraceOptions options);

  /// Blocks that are gathered and reduced together; see Unit::name().
  void add_unit(const std::string& unit, const std::vector<std::string>& blocks);
  /// Before the first step: which are recorded, instead of those of the options.
  void record_steps(std::int64_t first, std::int64_t last);
  /// Adds a counter for each category: as the books are when work is launched. That is shown at the
  /// moment when the work runs on the compute stream; what is launched elsewhere after some work
  /// of that stream is shown at its end.
  void count_memory(const std::string& name, const engine::Memory& memory);

  /// What is launched from here to end_step() belongs to `step`, which is larger than any before.
  /// What is launched elsewhere, or in a step that is not asked for, is not recorded.
  void begin_step(std::int64_t step);
  /// Hands what has been told to the writer, so that nothing piles up. Steps that are not recorded
  /// end as well, as they do the same for what a GPU tells late.
  void end_step();
  /// Whatever is told has been told: the streams are gone, or drained. Hands over the rest.
  void finish();

  /// Of each step that is complete; after finish() of all that were recorded.
  std::vector<StepOverlap> overlaps() const;
  /// Launches that are missing, as there was no memory for them.
  std::int64_t num_lost() const;

  std::optional<std::uint64_t> on_enqueue(const engine::LaunchRequest& request) noexcept override;
  void on_launch(const engine::LaunchRecord& record) noexcept override;

 private:
  // Where a stream is shown: on one thread, or where streams of one name ran at once, on several.
  struct Track {
    std::string name;
    int order;
    std::vector<int> threads = {};
    std::vector<std::int64_t> end_ns = {};  // of each
  };
  // A launch: first what is known when it is enqueued.
  struct Launch {
    std::int64_t step = 0;
    Track* track = nullptr;
    std::string_view kind = {};  // "compute", one of Overlap::kinds, or "auxiliary"
    std::string unit, phase;
    std::shared_ptr<LaunchPoint> point;
    std::vector<TraceMemory::Change> memory;
    std::shared_ptr<std::vector<TraceMemory::Change>> memory_after;  // of the compute stream
    engine::Work work = {};
    std::int64_t begin_ns = 0, end_ns = 0;
  };
  struct Step {
    std::int64_t num_enqueued = 0, num_told = 0;
    bool has_ended = false;
    Interval compute = {};  // from the first launch that computes to the last
    std::vector<Interval> computed = {};
    std::map<std::string, std::vector<Interval>, std::less<>> sent = {};  // by kind
    std::vector<TraceMemory::Change> memory = {};                         // at the end
    std::string peaks = {};                                               // JSON
    bool is_complete() const { return has_ended && num_told == num_enqueued; }
  };
  // Launches of one unit and phase, one after the other.
  struct Run {
    std::string unit, phase;
    Interval time;
  };

  std::uint64_t enqueue(const engine::LaunchRequest& request, TraceMemory::Sample sample);
  void count(std::vector<TraceMemory::Change> changes, Launch& launch);
  Track& track_of(const std::string& stream);
  TraceThread thread_of(Track& track, std::int64_t begin_ns, std::int64_t end_ns);
  void add(Launch& launch);
  void extend_run(const Launch& launch);
  void end_run();
  void end_steps(bool all);
  void end(std::int64_t number, Step& step, const std::vector<Interval>& computed);
  void hand_over(bool all);

  TraceWriter& writer_;
  TraceOptions options_;
  std::atomic<bool> is_recording_ = false;
  TraceMemory memory_;  // sampled outside the mutex

  mutable std::mutex mutex_;
  TraceEvents events_;
  TraceFlows flows_;
  std::map<std::string, Track> tracks_;
  int num_threads_ = 0;
  std::uint64_t num_tickets_ = 0;
  std::uint64_t num_arrows_ = 0;
  std::int64_t step_ = 0;  // the last that has begun
  std::int64_t num_lost_ = 0;
  std::unordered_map<std::uint64_t, Launch> enqueued_;
  std::vector<Launch> told_;
  std::shared_ptr<std::vector<TraceMemory::Change>> after_;  // of the last launch of a step
  std::vector<TraceMemory::Change> ahead_;                   // before the first
  std::map<std::int64_t, Step> steps_;                       // that are not complete yet
  std::vector<Interval> last_computed_;                      // in the step before those
  std::optional<Run> run_;
  std::vector<StepOverlap> overlaps_;
};

}  // namespace tessera::tools
