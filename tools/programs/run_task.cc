#include "tools/programs/run_task.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/host_gather.h"
#include "comm/process_group.h"
#include "engine/cuda.h"
#include "engine/error.h"
#include "engine/gemm/gemm_algorithms.h"
#include "engine/io/file.h"
#include "engine/io/text.h"
#include "tools/cli/main.h"
#include "tools/cli/stop.h"
#include "tools/config/rates_config.h"
#include "tools/config/replicas.h"
#include "tools/launch/arithmetic.h"
#include "tools/launch/cpu.h"
#include "tools/launch/equal_processes.h"
#include "tools/launch/launch_warnings.h"
#include "tools/launch/launcher.h"
#include "tools/launch/processes.h"
#include "tools/launch/product_rate.h"
#include "tools/launch/ranks.h"
#include "tools/machine/environment.h"
#include "tools/machine/limits.h"
#include "tools/planning/plan_report.h"
#include "tools/planning/task_plan.h"
#include "tools/programs/audit.h"
#include "tools/programs/gemm_choice.h"
#include "tools/programs/memory_check.h"
#include "tools/programs/run_checks.h"
#include "tools/programs/unmet_requests.h"
#include "tools/report/advice.h"
#include "tools/report/flight_output.h"
#include "tools/report/hook_report.h"
#include "tools/report/late_ranks.h"
#include "tools/report/rank_errors.h"
#include "tools/report/run_failure.h"
#include "tools/report/run_probe.h"
#include "tools/report/run_trace.h"
#include "tools/trace/trace_events.h"
#include "tools/train/checkpoint_folder.h"
#include "tools/train/graph_choice.h"
#include "tools/train/shared_folder.h"

namespace tessera::tools {
namespace {

struct Result {
  std::int64_t start = 0;  // after which step the run began
  std::string params_sha256;
  std::optional<Trainer::Validation> validation;
  std::string sample;
  std::optional<std::int64_t> checkpoint;  // see Task::closing_line()
  JsonRecord end;
  std::optional<LateRank> late;
};

// What the ranks of this process share; null: not asked for.
struct Run {
  const Ranks& ranks;
  const Task& task;
  std::shared_ptr<engine::GemmAlgorithms> gemms = {};
  RunIdentity identity = {};
  std::unique_ptr<RunTrace> trace = {};
  std::unique_ptr<RunProbe> probe = {};
  std::unique_ptr<Audits> audits = {};
  std::shared_ptr<const comm::FlightRecorder> flight = {};
};

// fn(), whose error the other ranks are told of at once: to give back what this rank has made may
// take long, and whoever is told of it then, as by ~Fsdp(), is not told why.
template <class F>
auto told(comm::ProcessGroup& world, F&& fn) {
  try {
    return fn();
  } catch (...) {
    world.abort(message_of(std::current_exception()));
    throw;
  }
}

// Collective, as each knows for whom it waited.
std::optional<LateRank> late_rank(comm::ProcessGroup& world, const LateRanks& late,
                                  const RunLog* log) {
  const auto texts = comm::gather_texts(world, late.text(), engine::Memory(),
                                        engine::Stream::inline_cpu("late"), "who was late");
  const auto figures = log == nullptr ? std::nullopt : log->figures();
  if (!figures) return std::nullopt;
  return find_late_rank(texts, late.num_steps(), figures->step_ms.median);
}

// `log`: null but on rank 0.
Result train_rank(comm::ProcessGroup& all, const Run& run, RunLog* log) {
  const Ranks& ranks = run.ranks;
  const Task& task = run.task;
  const TrainConfig& config = task.config();
  RunTrace* const trace = run.trace.get();
  Audit* audit = nullptr;
  if (run.audits != nullptr) {
    audit = &run.audits->add(Audit(plan_task(task, ranks, all.rank()),
                                   plan_target(ranks, config, all.rank()), config.log.val_every));
  }
  const std::unique_ptr<TaskRank> rank = task.rank();
  comm::ProcessGroup& world = rank->group(all);
  Model& model = rank->model();
  TraceRecorder* recorder = trace == nullptr ? nullptr : &trace->recorder(world.rank());
  Probe* probe = run.probe == nullptr ? nullptr : &run.probe->probe(world.rank());
  const engine::Stream compute = ranks.compute(world.rank(), {.listener = recorder});
  if constexpr (engine::kCudaBuilt) {
    if (run.gemms != nullptr) engine::set_gemm_algorithms(compute, run.gemms);
  }
  Trainer trainer(world, compute, config, model.blocks(), model.root(), log,
                  {.trace = recorder, .probe = probe});
  return told(world, [&]() -> Result {
    rank->load(trainer, log);
    const TrainPosition start = trainer.open_checkpoints(run.identity);
    if (trace != nullptr) trace->start_behind(start.step, world.rank());
    if (run.probe != nullptr) run.probe->start_behind(start.step);
    if (audit != nullptr) audit->start_behind(start.step);
    if (audit != nullptr) trainer.on_step([audit](const StepRecord& step) { audit->add(step); });
    const HookReport hook(trainer.fsdp(), config.comm.options());
    const auto loss = [&](std::int64_t first_sample, const Batch& batch) {
      return model.loss(trainer.tape(), batch,
                        {.recompute = config.train.recompute,
                         .seed = static_cast<std::uint64_t>(config.train.seed),
                         .first_sample = first_sample,
                         .samples_before = trainer.samples_before()});
    };
    std::optional<double> peak_flop_per_s;
    if (ranks.num_gpus == 0 && config.log.peak_ms > 0) {
      peak_flop_per_s = product_flop_per_s(world, config.precision.param,
                                           std::chrono::milliseconds(config.log.peak_ms));
    }
    world.barrier("loaded");  // only now can no rank fail to start
    if (log != nullptr) {
      if (peak_flop_per_s) log->set_rates(task.items().flops, *peak_flop_per_s);
      const auto pause = world.pause_deadline();
      log->begin(start.step);
      for (const std::string& line : unmet_requests(config, start)) {
        log->say("note: " + line, Console::Style::kStrong);
      }
      for (const std::string& line : hook.lines()) log->say(line);
      if (!hook.lines().empty()) log->write_file("comm_hook.txt", hook.table());
    }
    if (trace != nullptr && world.rank() == ranks.local.first) trace->begin();
    std::optional<LateRanks> late;
    if (ranks.are_processes() && ranks.num_gpus == 0) late.emplace(run.flight);
    if (log != nullptr && late) log->add_to_steps([&late] { return late->step(); });
    trainer.run(rank->data(), loss, rank->validation(trainer), task.items().per_sample);
    if (log != nullptr) log->add_to_steps({});
    return {.start = start.step,
            .params_sha256 = trainer.params_sha256(),
            .validation = trainer.validation(),
            .sample = rank->finish(trainer, log),
            .checkpoint = trainer.saved_step(),
            .end = trainer.end_record().add_all(hook.record()),
            .late = late ? late_rank(world, *late, log) : std::nullopt};
  });
}

// Of a run without checkpoints nobody asks.
RunIdentity identity_of(const Task& task, const Ranks& ranks, const engine::GemmAlgorithms* gemms,
                        std::string config_toml) {
  const CheckpointConfig& c = task.config().checkpoint;
  if (!c.saves() && !c.resumes()) return {};
  return {.model = task.model_text(),
          .data = task.data_text(),
          .config = std::move(config_toml),
          .data_digest = task.data_digest(),
          .arithmetic = arithmetic_text(ranks, gemms)};
}

// What all processes of a run must have in common. An interface may be an address of one host.
std::string process_text(const Run& run, std::string config_toml) {
  constexpr std::string_view kOfHost = "\ninterface = ";
  if (const std::size_t at = config_toml.find(kOfHost); at != std::string::npos) {
    config_toml.erase(at, config_toml.find('\n', at + 1) - at);
  }
  return fmt::format("{}[data]\ndigest = {}\n[launch]\nranks_of_a_replica = {}\n[arithmetic]\n{}",
                     config_toml, run.task.data_digest(), run.ranks.replica().first,
                     arithmetic_text(run.ranks, run.gemms.get()));
}

// Beside what rank 0 did, for the summary: the plan that was audited, or else one that is made now.
// There may be none, as of a model whose steps depend on values.
void add_plan(RunLog& log, const Run& run, std::int64_t start) {
  std::optional<TrainPlan> made;
  const TrainPlan* plan = run.audits == nullptr ? nullptr : &run.audits->first().plan();
  if (plan == nullptr) {
    try {
      plan = &made.emplace(plan_task(run.task, run.ranks));
    } catch (const std::exception&) {  // the run has ended well without
      return;
    }
  }
  log.add_plan(
      [&](std::int64_t step) -> const StepRecord& { return planned_step(*plan, step, start); });
}

RunPlace run_place(const Ranks& ranks, const MachineLimits& limits) {
  // A launcher that leaves a process a part of the machine's cores gives the others other ones.
  const bool has_own_cores = ranks.are_processes() && limits.num_allowed < limits.num_cores;
  return {.num_ranks = ranks.size,
          .num_gpus = ranks.num_gpus,
          .num_cores = limits.usable_cores(),
          .num_sharing = has_own_cores ? ranks.local.count : ranks.local.num_on_host,
          .num_processes = ranks.launch.num_processes};
}

// Says and writes what the run leaves.
void report(RunLog& log, const Run& run, const Result& result) {
  const Task& task = run.task;
  const Ranks& ranks = run.ranks;
  if (!result.sample.empty()) {
    log.say(fmt::format(
        "\n---- generated -----------------------------------------------------------\n{}\n"
        "--------------------------------------------------------------------------\n",
        result.sample));
  }
  if (const auto figures = log.figures()) {
    add_plan(log, run, result.start);
    log.summary(result.late ? result.late->str() : "",
                advice(*figures, task.config(), run_place(ranks, read_limits())));
  }
  const auto& validation = result.validation;
  if (validation && !validation->summary.empty()) log.say(validation->summary);
  log.say(fmt::format("parameters sha256 {}\nlog {}\nfiles in {}", result.params_sha256,
                      engine::escaped(log.jsonl_path()), engine::escaped(log.folder())));
  if (run.trace != nullptr) log.say(run.trace->summary());
  if (run.audits != nullptr) {
    for (const std::string& line : run.audits->lines()) log.say(line);
  }
  if (const std::string line = task.closing_line(result.checkpoint); !line.empty()) log.say(line);
  JsonRecord end = ranks.record().add_all(result.end);
  if (run.trace != nullptr) end.add_all(run.trace->record());
  if (run.audits != nullptr) {
    const Audit& first = run.audits->first();
    const PlanTarget target = plan_target(ranks, task.config(), first.rank());
    end.add_literal("planned", plan_record(first.plan(), target).text());
  }
  if (result.late) end.add_all(result.late->record());
  if (validation) end.add_all(validation->record);
  log.finish(result.params_sha256, validation ? std::optional(validation->loss) : std::nullopt,
             end);
  if (!result.sample.empty()) log.write_file("sample.txt", result.sample + "\n");
}

// Runs the ranks to their end, or throws what is said of their failure. `log`: null but in the
// process of rank 0.
void run_ranks(const Ranks& ranks, Task& task, const RunLog* log, FlightOutput& flight,
               const std::function<void(comm::ProcessGroup&)>& fn) {
  RankErrors errors(ranks.local);
  const auto watched = [&](comm::ProcessGroup& world) {
    errors.watch(world.rank(), [&] { fn(world); });
  };
  try {
    ranks.run(std::as_const(task).config(), watched, &flight);
  } catch (...) {
    rethrow_failure(flight, errors, log != nullptr && log->has_begun(),
                    [&] { return memory_lines(plan_task(task, ranks)); });
  }
}

// Draws what is planned as well, if there is a file for it.
void say_plan(const Task& task, const Ranks& ranks, const std::vector<std::string>& warnings,
              const std::vector<std::string>& budget_lines, const std::string& shortage,
              std::optional<engine::AtomicFile>& trace_file) {
  TraceWriter trace(
      [&](std::string_view text) { trace_file->write(std::as_bytes(std::span(text))); });
  const TrainPlan plan = plan_task(task, ranks, /*rank=*/0, trace_file ? &trace : nullptr);
  if (trace_file) trace_file->commit();
  for (const std::string& line : task.warnings()) fmt::print("warning: {}\n", line);
  for (const std::string& line : warnings) fmt::print("{}\n", line);
  for (const std::string& line : budget_lines) fmt::print("{}\n", line);
  for (const std::string& line : plan_lines(plan, plan_target(ranks, task.config()))) {
    fmt::print("{}\n", line);
  }
  if (!shortage.empty()) fmt::print("{}\n", shortage);
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
  const Launch launch =
      find_launch(environment(), config.plan ? LauncherChoice::kAuto : config.parallel.launcher);
  const bool is_first = launch.process == 0;  // who tells a person what all of them do
  if (config.plan && !is_first) return;
  if (is_first) check_resumed_folder(config.checkpoint);
  std::vector<std::string> warnings;
  if (!config.plan) warnings = launch_warnings(environment(), launch, config);
  const Ranks ranks = Ranks::choose(config, launch);
  task.config().parallel.local_ranks = ranks.local.num_on_host;
  std::tie(task.config().parallel.replica_ranks, task.config().parallel.replica_place) =
      ranks.replica();
  check_run(config, flags, ranks);
  if (!config.plan)
    check_pins(config.cpu, ranks.local.num_on_host);  // a plan may be of another machine
  const std::string graph = graph_line(config, ranks.size, ranks.num_gpus > 0);
  task.prepare(flags, ranks.num_gpus > 0);
  std::optional<engine::AtomicFile> trace_file;  // of a plan, or throws
  if (config.plan && !config.log.trace.empty()) {
    trace_file.emplace(resolve_user_path(config.log.trace));
  }
  const std::vector<std::string> budget_lines = fit_task(task, ranks);
  if (std::string line = replicas_warning(config, ranks.size); !line.empty()) {
    warnings.push_back(std::move(line));
  }
  const std::string shortage = check_shortage(memory_shortage(task, ranks), config);
  if (config.plan) {
    return say_plan(task, ranks, warnings, budget_lines, shortage, trace_file);
  }
  if (!shortage.empty()) warnings.push_back(shortage);
  // From the start of the ranks, or when processes have met, to the very end.
  std::optional<StopSignals> signals;
  std::optional<RunLog> log;
  const auto say = [&log](const std::string& line, Console::Style style = Console::Style::kPlain) {
    if (log) log->say(line, style);
  };
  if (is_first) {
    log.emplace(config, task.items().name, flags.to_toml());
    check_checkpoint_folder(config);
    // Or throws, before training.
    if (task.samples()) engine::AtomicFile(log->folder() + "/sample.txt");
  }
  FlightOutput flight(resolve_user_path(config.out), ranks.local);
  Run run{.ranks = ranks, .task = task, .flight = flight.recorder()};
  if (!config.log.trace.empty()) run.trace = std::make_unique<RunTrace>(config, ranks.local);
  if (!config.log.probe.empty()) {
    run.probe = std::make_unique<RunProbe>(config, ranks.local, flags.to_json());
  }
  if (config.audit) run.audits = std::make_unique<Audits>(ranks.local);
  say(task.summary());
  for (const std::string& line : task.warnings()) {
    say("warning: " + line, Console::Style::kWarning);
  }
  say("device: " + ranks.str());
  if (const std::string line = ranks.launch_str(); !line.empty()) say(line);
  if (!graph.empty()) say(graph);
  for (const std::string& line : warnings) say(line, Console::Style::kWarning);
  for (const std::string& line : budget_lines) say(line);
  const bool shares_gemms = ranks.are_processes() && ranks.num_gpus > 0;
  if (log && !shares_gemms) run.gemms = choose_gemm_algorithms(task, ranks, *log);
  run.identity = identity_of(task, ranks, run.gemms.get(), flags.to_toml());
  Result result;
  std::string difference;  // between processes
  if (!ranks.are_processes()) signals.emplace();
  try {
    joins = true;
    run_ranks(ranks, task, log ? &*log : nullptr, flight, [&](comm::ProcessGroup& world) {
      const bool is_root = world.rank() == 0;
      // Before, one that waits for others to join ends at once.
      if (ranks.are_processes() && world.rank() == ranks.local.first) signals.emplace();
      pin_rank(config.cpu, ranks.local, world.rank());
      if (ranks.are_processes()) {
        const engine::Stream stream = ranks.compute(world.rank());
        if (shares_gemms) {
          run.gemms = share_gemm_algorithms(world, stream, task, ranks, log ? &*log : nullptr);
          run.identity = identity_of(task, ranks, run.gemms.get(), flags.to_toml());
        }
        std::string found =
            difference_of_processes(world, stream, process_text(run, flags.to_toml()));
        const bool differ = !found.empty();
        if (world.rank() == ranks.local.first) difference = std::move(found);
        if (differ) return;
        if (config.checkpoint.saves()) {
          check_shared_folder(world, config.checkpoint.folder(config.out), engine::Memory(stream),
                              stream);
        }
      }
      Result mine = train_rank(world, run, is_root ? &*log : nullptr);
      if (is_root) result = std::move(mine);
    });
    engine::require(difference.empty(), "{}", difference);
    if (run.trace != nullptr) run.trace->close();
    if (log) report(*log, run, result);
  } catch (...) {
    if (run.probe != nullptr) run.probe->keep();  // what led to an error is worth comparing
    if (run.trace != nullptr) run.trace->keep();
    throw;
  }
  if (run.probe != nullptr) {  // after the report, which a full disk must not cost the run
    run.probe->commit();
    say(run.probe->summary());
    if (log) log->flush();
  }
  if (run.trace != nullptr) run.trace->flush();
  if (run.audits != nullptr) run.audits->shown().check();
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
