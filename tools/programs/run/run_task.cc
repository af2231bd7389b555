#include "tools/programs/run/run_task.h"

#include <fmt/format.h>

#include <exception>
#include <functional>
#include <iostream>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "comm/process_group.h"
#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/memory.h"
#include "engine/stream.h"
#include "tools/cli/stop.h"
#include "tools/config/rates_config.h"
#include "tools/launch/cpu.h"
#include "tools/launch/equal_processes.h"
#include "tools/launch/launcher.h"
#include "tools/launch/processes.h"
#include "tools/launch/ranks.h"
#include "tools/machine/environment.h"
#include "tools/planning/plan_report.h"
#include "tools/planning/task_plan.h"
#include "tools/programs/run/gemm_choice.h"
#include "tools/programs/run/process_run.h"
#include "tools/programs/run/run_report.h"
#include "tools/programs/run/run_start.h"
#include "tools/programs/run/train_rank.h"
#include "tools/report/flight_output.h"
#include "tools/report/rank_errors.h"
#include "tools/report/run_failure.h"
#include "tools/report/run_log.h"
#include "tools/trace/trace_events.h"
#include "tools/train/checkpoint_folder.h"
#include "tools/train/shared_folder.h"

namespace tessera::tools {
namespace {

// Tells what a training would do, and draws it if there is a file for it.
void plan_run(const FlagSet& flags, Task& task, const Launch& launch) {
  const std::string& path = std::as_const(task).config().log.trace;
  std::optional<engine::AtomicFile> file;  // or throws
  if (!path.empty()) file.emplace(resolve_user_path(path));
  const RunStart start = prepare_run(flags, task, launch);
  TraceWriter trace([&](std::string_view text) { file->write(std::as_bytes(std::span(text))); });
  const TrainPlan plan = plan_task(task, start.ranks, /*rank=*/0, file ? &trace : nullptr);
  if (file) file->commit();
  for (const std::string& line : task.warnings()) fmt::print("warning: {}\n", line);
  for (const std::string& line : start.warnings) fmt::print("{}\n", line);
  for (const std::string& line : start.budget_lines) fmt::print("{}\n", line);
  for (const std::string& line : plan_lines(plan, plan_target(start.ranks, task.config()))) {
    fmt::print("{}\n", line);
  }
  if (!start.shortage.empty()) fmt::print("{}\n", start.shortage);
}

// How often training sees its samples; empty: that is no one number.
std::string epochs_text(const Task& task, const Ranks& ranks) {
  const StepConfig& train = task.config().train;
  const std::int64_t per_step = train.batch * train.accum * ranks.size, num = task.num_samples();
  if (num == 0) return "";
  const double epochs = double(train.steps) * double(per_step) / double(num);
  const std::string text = fmt::format("training: {} steps of {} samples, {:.{}f} epochs",
                                       train.steps, per_step, epochs, epochs < 10 ? 2 : 0);
  return per_step <= num ? text : fmt::format("{}; a step has more than all {}", text, num);
}

// What is known before the ranks start.
void say_start(RunLog& log, const Task& task, const RunStart& start) {
  const auto warn = [&](const std::string& line) { log.say(line, Console::Style::kWarning); };
  log.say(task.summary());
  if (const std::string line = epochs_text(task, start.ranks); !line.empty()) log.say(line);
  for (const std::string& line : task.warnings()) warn("warning: " + line);
  log.say("device: " + start.ranks.str());
  if (const std::string line = start.ranks.launch_str(); !line.empty()) log.say(line);
  if (!start.graph.empty()) log.say(start.graph);
  for (const std::string& line : start.warnings) warn(line);
  if (!start.shortage.empty()) warn(start.shortage);
  for (const std::string& line : start.budget_lines) log.say(line);
}

// Runs the ranks to their end, or throws what is said of their failure. `log`: null but in the
// process of rank 0.
void run_ranks(const Ranks& ranks, const Task& task, const RunLog* log, FlightOutput& flight,
               const std::function<void(comm::ProcessGroup&)>& fn) {
  RankErrors errors(ranks.local);
  const auto watched = [&](comm::ProcessGroup& world) {
    errors.watch(world.rank(), [&] { fn(world); });
  };
  try {
    ranks.run(task.config(), watched, &flight);
  } catch (...) {
    rethrow_failure(flight, errors, log != nullptr && log->has_begun(),
                    [&] { return memory_lines(plan_task(task, ranks)); });
  }
}

// For each rank, once all processes have met: whether they are about to do the same. Returns how
// they differ, on every rank; empty if they do not. `log`: null but on rank 0.
std::string compare_processes(comm::ProcessGroup& world, ProcessRun& run, RunLog* log) {
  const Ranks& ranks = run.ranks;
  const CheckpointConfig& checkpoint = run.task.config().checkpoint;
  const engine::Stream stream = ranks.compute(world.rank());
  if (ranks.num_gpus > 0) {
    auto gemms = share_gemm_algorithms(world, stream, run.task, ranks, log);
    std::call_once(run.has_gemms, [&] { run.gemms = std::move(gemms); });
  }
  std::string difference = difference_of_processes(world, stream, run.text());
  if (difference.empty() && checkpoint.saves()) {
    check_shared_folder(world, checkpoint.folder(run.task.config().out), engine::Memory(stream),
                        stream);
  }
  return difference;
}

// Trains on the ranks of this process. `joins` becomes true when it looks for the other processes.
void train(const FlagSet& flags, const Task& task, const RunStart& start, bool& joins) {
  const TrainConfig& config = task.config();
  const Ranks& ranks = start.ranks;
  // From the start of the ranks, or when processes have met, to the very end.
  std::optional<StopSignals> signals;
  std::optional<RunLog> log;
  if (ranks.launch.process == 0) {
    log.emplace(config, task.items().name, flags.to_toml());
    check_checkpoint_folder(config);
    // Or throws, before training.
    if (task.samples()) engine::AtomicFile(log->folder() + "/sample.txt");
  }
  FlightOutput flight(resolve_user_path(config.out), ranks.local);
  ProcessRun run(ranks, task, flags, flight);
  if (log) say_start(*log, task, start);
  if (!ranks.are_processes()) {
    run.gemms = choose_gemm_algorithms(task, ranks, *log);
    signals.emplace();
  }
  RankResult result;
  std::string difference;  // between processes
  try {
    joins = true;
    run_ranks(ranks, task, log ? &*log : nullptr, flight, [&](comm::ProcessGroup& world) {
      const bool is_root = world.rank() == 0, is_first = world.rank() == ranks.local.first;
      RunLog* const own_log = is_root ? &*log : nullptr;
      // Before, one that waits for others to join ends at once.
      if (ranks.are_processes() && is_first) signals.emplace();
      pin_rank(config.cpu, ranks.local, world.rank());
      if (ranks.are_processes()) {
        std::string found = compare_processes(world, run, own_log);
        const bool differ = !found.empty();
        if (is_first) difference = std::move(found);
        if (differ) return;
      }
      RankResult mine = train_rank(world, run, own_log);
      if (is_root) result = std::move(mine);
    });
    engine::require(difference.empty(), "{}", difference);
    if (run.trace != nullptr) run.trace->close();
    if (log) report_run(*log, run, result);
  } catch (...) {
    run.keep();  // what led to an error is worth comparing
    throw;
  }
  if (run.probe != nullptr) {  // after the report, which a full disk must not cost the run
    run.probe->commit();
    if (log) {
      log->say(run.probe->summary());
      log->flush();
    }
  }
  if (run.trace != nullptr) run.trace->flush();
  if (run.audits != nullptr) run.audits->shown().check();
}

// This process will not join those that were started with it.
void decline(const TrainConfig& config, const std::exception_ptr& why) noexcept {
  if (config.plan) return;
  try {
    decline_processes(config, find_launch(environment(), config.parallel.launcher),
                      message_of(why));
  } catch (const std::exception&) {  // nothing says which ones they are
  }
}

// As run_task(). `joins`: whether it has come so far that the processes look for each other.
void run(int argc, char** argv, FlagSet& flags, Task& task, bool& joins) {
  task.add_to(flags);
  if (!flags.parse(argc, argv, std::cout)) return;
  const TrainConfig& config = task.config();
  config.validate(flags);
  if (!config.plan && !config.audit && config.memory_budget.empty())
    RatesConfig::check_unused(flags);
  choose_cpu(config.cpu);
  if (config.plan) {
    const Launch launch = find_launch(environment(), LauncherChoice::kAuto);
    if (launch.process == 0) plan_run(flags, task, launch);  // one tells a person
    return;
  }
  const Launch launch = find_launch(environment(), config.parallel.launcher);
  train(flags, task, prepare_run(flags, task, launch), joins);
}

}  // namespace

void run_task(int argc, char** argv, FlagSet flags, Task& task) {
  bool joins = false;
  try {
    run(argc, argv, flags, task, joins);
  } catch (...) {
    if (!joins) decline(std::as_const(task).config(), std::current_exception());
    throw;
  }
}

}  // namespace tessera::tools
