#include "tools/trace/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "engine/error.h"
#include "engine/io/json.h"
#include "tools/io/jsonl.h"

namespace tessera::tools {

using engine::LaunchRecord;
using engine::LaunchRequest;

// [Note: what is known when]
// The order in which the thread of a rank launches work says what belongs together: the step, the
// region, which gather a computation has waited for, and the memory that it works in. So all of
// that is kept when a launch is enqueued. When it ran is told once it has run: on a GPU a step
// later. What has been told becomes text at the end of each step, while nothing is launched.

namespace {

constexpr std::string_view kCompute = "compute", kAuxiliary = "auxiliary";

template <std::size_t N>
bool is_one_of(std::string_view name, const std::array<std::string_view, N>& names) {
  return std::ranges::find(names, name) != names.end();
}

// What a launch counts as: computation, communication of a kind, or something else of the host.
std::string_view kind_of(std::string_view work, std::string_view stream) {
  constexpr std::array<std::string_view, 5> kCollectives = {
      "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"};
  constexpr std::array<std::string_view, 5> kOffload = {"fetch", "sums up", "sums down", "up",
                                                        "down"};
  if (is_one_of(work, kCollectives)) {
    return stream == "gather" ? "parameters" : stream == "reduce" ? "gradients" : "other";
  }
  if (is_one_of(stream, kOffload)) return "offload";
  return stream == "compute" || stream == "optimizer" ? kCompute : kAuxiliary;
}

// In which order threads are shown.
int order_of(std::string_view track) {
  constexpr std::array<std::string_view, 11> kOrder = {
      "compute",   "gather", "reduce", "optimizer", "fetch", "sums up",
      "sums down", "up",     "down",   "metrics",   "loader"};
  const auto it = std::ranges::find(kOrder, track);
  return 2 + static_cast<int>(it - kOrder.begin());
}

// "all_gather h.0 forward"
std::string name_of(const engine::Work& work) {
  std::string name(work.name);
  if (!work.detail.empty()) name += " " + work.detail;
  return name;
}

std::string args_of(std::string_view unit, std::string_view phase, const engine::Work& work) {
  std::string args = R"({"op":)";
  append_literal(args, work.name);
  const auto add = [&](std::string_view key, std::string_view value) {
    if (value.empty()) return;
    args += key;
    append_literal(args, value);
  };
  add(R"(,"unit":)", unit);
  add(R"(,"phase":)", phase);
  add(R"(,"detail":)", work.detail);
  fmt::format_to(std::back_inserter(args), R"(,"flops":{},"bytes_read":{},"bytes_written":{}}})",
                 engine::json_literal(work.flops), work.bytes_read, work.bytes_written);
  return args;
}

}  // namespace

TraceRecorder::TraceRecorder(TraceWriter& writer, TraceOptions options)
    : writer_(writer), options_(std::move(options)) {}

void TraceRecorder::add_unit(const std::string& unit, const std::vector<std::string>& blocks) {
  const std::lock_guard lock(mutex_);
  flows_.add_unit(unit, blocks);
}

void TraceRecorder::count_memory(const std::string& name, const engine::Memory& memory) {
  const std::lock_guard lock(mutex_);
  memory_.add(name, memory);
}

void TraceRecorder::record_steps(std::int64_t first, std::int64_t last) {
  const std::lock_guard lock(mutex_);
  options_.first_step = first;
  options_.last_step = last;
}

void TraceRecorder::begin_step(std::int64_t step) {
  const std::lock_guard lock(mutex_);
  engine::require(step > step_, "[trace] expected a step after {}, got {} ({})", step_, step,
                  options_.process_name);
  step_ = step;
  if (step < options_.first_step || step > options_.last_step) return;
  steps_[step];
  is_recording_ = true;
}

void TraceRecorder::end_step() {
  const TraceMemory::Sample sample = is_recording_ ? memory_.sample() : TraceMemory::Sample();
  const std::lock_guard lock(mutex_);
  if (is_recording_.exchange(false)) {
    Step& step = steps_.at(step_);
    step.has_ended = true;
    step.memory = std::exchange(ahead_, {});
    for (TraceMemory::Change& change : memory_.changes(sample)) {
      step.memory.push_back(std::move(change));
    }
    after_.reset();
    step.peaks = memory_.peaks(sample);
    flows_.end_step();
  }
  hand_over(/*all=*/false);
}

void TraceRecorder::finish() {
  const std::lock_guard lock(mutex_);
  is_recording_ = false;
  hand_over(/*all=*/true);
}

std::vector<StepOverlap> TraceRecorder::overlaps() const {
  const std::lock_guard lock(mutex_);
  return overlaps_;
}

std::int64_t TraceRecorder::num_lost() const {
  const std::lock_guard lock(mutex_);
  return num_lost_;
}

// What is launched
// -------------------------------------------------------------------------------

std::optional<std::uint64_t> TraceRecorder::on_enqueue(const LaunchRequest& request) noexcept {
  if (!is_recording_) return std::nullopt;
  try {
    // Before the mutex: whoever tells of a launch may hold that of a memory.
    TraceMemory::Sample sample = memory_.sample();
    const std::lock_guard lock(mutex_);
    if (!is_recording_) return std::nullopt;
    return enqueue(request, std::move(sample));
  } catch (...) {
    const std::lock_guard lock(mutex_);
    ++num_lost_;
    return std::nullopt;
  }
}

std::uint64_t TraceRecorder::enqueue(const LaunchRequest& request, TraceMemory::Sample sample) {
  const std::string_view kind = kind_of(request.work.name, request.stream);
  Launch launch;
  launch.step = step_;
  launch.track = &track_of(request.stream);
  launch.kind = kind;
  launch.unit = request.scope.block.empty() ? flows_.unit_of_label(request.work.detail)
                                            : flows_.unit_of_block(request.scope.block);
  launch.phase = request.scope.phase;
  count(memory_.changes(sample), launch);
  launch.point = flows_.enqueue(request, kind == kCompute);
  enqueued_.emplace(num_tickets_ + 1, std::move(launch));
  ++steps_.at(step_).num_enqueued;
  return ++num_tickets_;
}

// On the time of the compute stream, which the books follow.
void TraceRecorder::count(std::vector<TraceMemory::Change> changes, Launch& launch) {
  const auto append = [&](std::vector<TraceMemory::Change>& to) {
    to.insert(to.end(), changes.begin(), changes.end());
  };
  if (launch.track->name != kCompute) return append(after_ != nullptr ? *after_ : ahead_);
  append(ahead_);
  launch.memory = std::exchange(ahead_, {});
  launch.memory_after = after_ = std::make_shared<std::vector<TraceMemory::Change>>();
}

void TraceRecorder::on_launch(const LaunchRecord& record) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    std::uint64_t ticket = record.ticket;
    if (ticket == 0) {  // of a stream that has not asked
      if (!is_recording_) return;
      ticket = enqueue({record.work, record.stream, {}}, {});
    }
    auto launch = enqueued_.extract(ticket);
    if (launch.empty()) return;
    launch.mapped().work = record.work;
    launch.mapped().begin_ns = record.begin_ns - options_.start_ns;
    launch.mapped().end_ns = record.end_ns - options_.start_ns;
    told_.push_back(std::move(launch.mapped()));
  } catch (...) {
    const std::lock_guard lock(mutex_);
    ++num_lost_;
  }
}

// What is shown
// ----------------------------------------------------------------------------------

TraceRecorder::Track& TraceRecorder::track_of(const std::string& stream) {
  const auto it = tracks_.find(stream);
  if (it != tracks_.end()) return it->second;
  return tracks_.emplace(stream, Track{stream, order_of(stream)}).first->second;
}

// Slices of one thread never overlap.
TraceThread TraceRecorder::thread_of(Track& track, std::int64_t begin_ns, std::int64_t end_ns) {
  const int process = options_.process + 1;  // 0 is taken: a viewer calls it idle
  const auto free =
      std::ranges::find_if(track.end_ns, [&](std::int64_t end) { return end <= begin_ns; });
  const auto i = static_cast<std::size_t>(free - track.end_ns.begin());
  if (free == track.end_ns.end()) {
    if (num_threads_ == 0) {
      events_.name_process(process, options_.process_name, options_.process);
    }
    track.end_ns.push_back(end_ns);
    track.threads.push_back(process * 10'000 + ++num_threads_);
    const std::string name = i == 0 ? track.name : track.name + " (" + std::to_string(i + 1) + ")";
    events_.name_thread({process, track.threads.back()}, name,
                        track.order * 100 + static_cast<int>(i));
  }
  track.end_ns[i] = end_ns;
  return {process, track.threads[i]};
}

void TraceRecorder::add(Launch& launch) {
  const TraceThread thread = thread_of(*launch.track, launch.begin_ns, launch.end_ns);
  events_.slice(thread, name_of(launch.work), launch.kind, launch.begin_ns, launch.end_ns,
                args_of(launch.unit, launch.phase, launch.work));
  for (const TraceMemory::Change& change : launch.memory) {
    events_.counter(thread.process, change.counter, launch.begin_ns, change.nbytes);
  }
  if (launch.memory_after != nullptr) {
    for (const TraceMemory::Change& change : *launch.memory_after) {
      events_.counter(thread.process, change.counter, launch.end_ns, change.nbytes);
    }
  }
  if (launch.point != nullptr) *launch.point = {true, thread, launch.begin_ns, launch.end_ns};
  if (launch.track->name == kCompute) extend_run(launch);

  const auto it = steps_.find(launch.step);
  if (it == steps_.end()) return;
  Step& step = it->second;
  ++step.num_told;
  const Interval time{launch.begin_ns, launch.end_ns};
  if (launch.kind == kCompute) {
    if (step.computed.empty()) step.compute = time;
    step.compute.begin_ns = std::min(step.compute.begin_ns, time.begin_ns);
    step.compute.end_ns = std::max(step.compute.end_ns, time.end_ns);
    step.computed.push_back(time);
  } else if (launch.kind != kAuxiliary) {
    step.sent[std::string(launch.kind)].push_back(time);
  }
}

void TraceRecorder::extend_run(const Launch& launch) {
  if (run_ && run_->unit == launch.unit && run_->phase == launch.phase) {
    run_->time.end_ns = launch.end_ns;
    return;
  }
  end_run();
  if (launch.phase.empty()) return;
  run_ = Run{launch.unit, launch.phase, {launch.begin_ns, launch.end_ns}};
}

void TraceRecorder::end_run() {
  if (!run_) return;
  Track& track = tracks_.emplace("units", Track{"units", 1}).first->second;
  const TraceThread thread = thread_of(track, run_->time.begin_ns, run_->time.end_ns);
  events_.slice(thread, run_->unit + " " + run_->phase, "unit", run_->time.begin_ns,
                run_->time.end_ns,
                JsonRecord().add("unit", run_->unit).add("phase", run_->phase).text());
  run_.reset();
}

void TraceRecorder::hand_over(bool all) {
  for (Launch& launch : std::exchange(told_, {})) add(launch);
  if (all) end_run();
  for (const TraceFlows::Flow& flow : flows_.take_told()) {
    // Inside the slices, and forwards as far as clocks agree.
    const LaunchPoint &from = *flow.from, &to = *flow.to;
    const std::int64_t leaves = std::max(std::min(from.end_ns - 1, to.begin_ns), from.begin_ns);
    const auto id = static_cast<std::uint64_t>(options_.process + 1) << 40 | ++num_arrows_;
    events_.arrow(flow.name, id, from.thread, leaves, to.thread,
                  std::max(to.begin_ns, std::min(leaves, to.end_ns - 1)));
  }
  end_steps(all);
  writer_.write(events_);
}

// What a step sends may be hidden by what its neighbours compute, so it ends when the next one is
// complete.
void TraceRecorder::end_steps(bool all) {
  while (!steps_.empty()) {
    const auto first = steps_.begin(), next = std::next(first);
    const bool is_complete =
        first->second.is_complete() &&
        (next == steps_.end() ? step_ > first->first : next->second.is_complete());
    if (!all && !is_complete) return;
    std::vector<Interval> computed = last_computed_;
    const auto add_all = [&](const std::vector<Interval>& more) {
      computed.insert(computed.end(), more.begin(), more.end());
    };
    add_all(first->second.computed);
    if (next != steps_.end()) add_all(next->second.computed);
    end(first->first, first->second, computed);
    last_computed_ = std::move(first->second.computed);
    steps_.erase(first);
  }
}

void TraceRecorder::end(std::int64_t number, Step& step, const std::vector<Interval>& computed) {
  Overlap overlap{.compute_ms = static_cast<double>(length_ns(merge(step.computed))) * 1e-6};
  std::vector<Interval> sent;
  for (const auto& [kind, intervals] : step.sent) {
    overlap.kinds[kind] = comm_times(intervals, computed);
    sent.insert(sent.end(), intervals.begin(), intervals.end());
  }
  overlap.comm = comm_times(sent, computed);
  overlaps_.push_back({number, overlap});
  if (step.computed.empty()) return;

  Track& track = tracks_.emplace("steps", Track{"steps", 0}).first->second;
  const TraceThread thread = thread_of(track, step.compute.begin_ns, step.compute.end_ns);
  const std::string args = JsonRecord()
                               .add("step", number)
                               .add_all(record_of(overlap))
                               // Not known of a step that did not end.
                               .add_literal("peak_bytes", step.peaks.empty() ? "null" : step.peaks)
                               .text();
  events_.slice(thread, "step " + std::to_string(number), "step", step.compute.begin_ns,
                step.compute.end_ns, args);
  for (const TraceMemory::Change& change : step.memory) {
    events_.counter(thread.process, change.counter, step.compute.end_ns, change.nbytes);
  }
}

}  // namespace tessera::tools
