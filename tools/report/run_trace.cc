#include "tools/report/run_trace.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

#include "engine/error.h"
#include "engine/io/json.h"
#include "engine/io/text.h"
#include "tools/cli/error_output.h"
#include "tools/cli/stop.h"

namespace tessera::tools {
namespace {

// A step of a large model with many micro-steps is some tens of MB for each rank.
constexpr std::size_t kMaxQueuedNbytes = std::size_t{1} << 30;

// Of each step the mean over ranks.
std::map<std::int64_t, Overlap> means_of(
    const std::vector<std::unique_ptr<TraceRecorder>>& recorders) {
  std::map<std::int64_t, std::vector<Overlap>> steps;
  for (const auto& recorder : recorders) {
    for (const StepOverlap& step : recorder->overlaps()) steps[step.step].push_back(step.overlap);
  }
  std::map<std::int64_t, Overlap> means;
  for (const auto& [step, overlaps] : steps) means[step] = mean_of(overlaps);
  return means;
}

bool is_something(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::symlink_status(path, ignored).type() !=
         std::filesystem::file_type::not_found;
}

}  // namespace

RunTrace::RunTrace(const TrainConfig& config, const LocalRanks& ranks)
    : config_(config),
      ranks_(ranks),
      path_(ranks.file_of(resolve_user_path(config.log.trace))),
      has_older_(is_something(path_)),
      file_(path_, JsonlWriter::Mode::kReplaceLater),
      background_(file_.fd(), path_, kMaxQueuedNbytes),
      writer_([this](std::string text) { write(std::move(text)); }) {
  const std::int64_t start_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(
                                    std::chrono::steady_clock::now().time_since_epoch())
                                    .count();
  for (const int rank : ranks.all()) {
    recorders_.push_back(std::make_unique<TraceRecorder>(
        writer_,
        TraceOptions{
            .process = rank, .process_name = fmt::format("rank {}", rank), .start_ns = start_ns}));
  }
}

void RunTrace::start_after(std::int64_t start, int rank) {
  const StepRange steps = config_.trace_steps(start);
  recorder(rank).record_steps(steps.first, steps.last);
  if (rank != ranks_.first) return;
  steps_ = steps;
  start_ = start;
}

void RunTrace::begin() {
  const std::lock_guard lock(mutex_);
  has_begun_ = true;
  if (!held_.empty()) put(std::exchange(held_, {}));
}

void RunTrace::warn(const std::string& what) {
  if (std::exchange(told_, true)) return;
  write_to_stderr(
      {"warning: [trace] ", engine::escaped(path_), ": ", what, "; the training goes on without\n"},
      kWarningPatience);
}

void RunTrace::write(std::string text) {
  const std::lock_guard lock(mutex_);
  if (!has_begun_) {
    held_ += text;
  } else {
    put(std::move(text));
  }
}

void RunTrace::put(std::string text) {
  if (!error_.empty()) return;
  if (!std::exchange(is_written_, true)) {
    try {
      file_.keep_while([](const nlohmann::json&) { return false; });
    } catch (const engine::IoError& e) {  // see [Note: output never ends a training] in run_log.h
      error_ = e.what();
      return warn(error_);
    }
  }
  background_.write(std::move(text));
  if (const auto error = background_.error()) warn(error->message());
}

void RunTrace::close() {
  if (std::exchange(is_closed_, true)) return;
  for (const auto& recorder : recorders_) recorder->finish();
  if (is_written_) writer_.close();
}

void RunTrace::keep() noexcept {
  try {
    close();
  } catch (const std::exception&) {  // nobody is left to be told
  }
}

RunTrace::~RunTrace() {
  // A file that this run made is nobody's.
  if (!is_written_ && !has_older_) ::unlink(path_.c_str());
}

std::int64_t RunTrace::num_lost() const {
  std::int64_t sum = 0;
  for (const auto& recorder : recorders_) sum += recorder->num_lost();
  return sum;
}

std::string RunTrace::summary() const {
  std::vector<Overlap> steps;
  for (const auto& [step, overlap] : means_of(recorders_)) steps.push_back(overlap);
  std::string line = fmt::format("trace {}", engine::escaped(path_));
  if (!is_written_) {
    return line + fmt::format(": not written, as {}{}", why_none_of(steps_, start_),
                              has_older_ ? "; what was there stays" : "");
  }
  if (num_lost() > 0) line += fmt::format(" (without {} launches, for lack of memory)", num_lost());
  if (steps.empty()) return line + ": no step";
  const Overlap mean = mean_of(steps);
  line += fmt::format(": communication {:.1f} ms a step", mean.comm.comm_ms);
  if (mean.comm.comm_ms == 0) return line;
  line += fmt::format(", {:.1f} ms of it hidden behind computation ({:.0f} %), {:.1f} ms exposed (",
                      mean.comm.hidden_ms, 100 * mean.comm.hidden_ms / mean.comm.comm_ms,
                      mean.comm.exposed_ms);
  const char* comma = "";
  for (const auto& [kind, times] : mean.kinds) {
    line += fmt::format("{}{} {:.1f}", std::exchange(comma, ", "), kind, times.exposed_ms);
  }
  return line + ")";
}

JsonRecord RunTrace::record() const {
  std::string steps;
  for (const auto& [step, overlap] : means_of(recorders_)) {
    steps += steps.empty() ? "" : ",";
    steps += JsonRecord().add("step", step).add_all(record_of(overlap)).text();
  }
  const std::string file = is_written_ ? engine::json_literal(path_) : "null";
  return JsonRecord().add_literal("trace", JsonRecord()
                                               .add_literal("file", file)
                                               .add("num_lost", num_lost())
                                               .add_literal("steps", "[" + steps + "]")
                                               .text());
}

void RunTrace::flush() {
  engine::require<engine::IoError>(error_.empty(), "{}", error_);
  background_.flush([] { return stop_requested() != 0; });
}

}  // namespace tessera::tools
