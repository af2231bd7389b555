// What train_transformer would do with the same options: without data, memory, GPUs or ranks.
#include <fmt/core.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/text.h"
#include "shard/placement.h"
#include "tools/cli/main.h"
#include "tools/cli/run_files.h"
#include "tools/config/replicas.h"
#include "tools/launch/cpu.h"
#include "tools/launch/launcher.h"
#include "tools/launch/ranks.h"
#include "tools/models/family.h"
#include "tools/planning/budget.h"
#include "tools/planning/plan_report.h"
#include "tools/planning/plan_table.h"
#include "tools/planning/planner.h"
#include "tools/planning/strategy_list.h"
#include "tools/planning/task_plan.h"
#include "tools/programs/run/memory_check.h"
#include "tools/programs/run/run_checks.h"
#include "tools/programs/transformer_config.h"
#include "tools/programs/transformer_memory.h"
#include "tools/programs/transformer_plan.h"
#include "tools/report/run_log.h"
#include "tools/trace/trace_events.h"
#include "tools/train/graph_choice.h"

namespace tessera::tools {

using engine::require;

namespace {

struct PlanConfig : TransformerConfig {
  std::int64_t processes = 1;
  std::string strategies;
  bool json = false;

  // Ranks of a plan are no threads.
  PlanConfig() { parallel.max_ranks = 1 << 20; }

  // Throws InvalidArgument for processes that the ranks cannot be in.
  Ranks ranks() const {
    if (processes == 1) return Ranks::planned(*this);
    require(device != DeviceChoice::kCuda,
            "[config] expected parallel.processes on CPUs, got device=cuda: over NCCL a GPU sends "
            "the same in whatever process it is");
    TrainConfig on_cpus = static_cast<const TrainConfig&>(*this);
    on_cpus.device = DeviceChoice::kCpu;
    on_cpus.parallel.transport = TransportChoice::kAuto;  // of the launcher that there will be
    return Ranks::choose(on_cpus, {.by = LauncherChoice::kEnv,
                                   .num_processes = static_cast<int>(processes),
                                   .num_hosts = static_cast<int>(processes)});
  }

  // Says what depends on the processes that ranks are in.
  void place_ranks() {
    if (processes == 1) return;
    require(parallel.ranks % processes == 0,
            "[config] expected parallel.ranks in {} equal processes, got {}", processes,
            parallel.ranks);
    if (parallel.threads == 0) parallel.threads = parallel.ranks / processes;
    require(std::max<std::int64_t>(parallel.threads, 1) * processes <= parallel.max_ranks,
            "[config] expected at most {} ranks, got {} processes of {} (parallel.processes)",
            parallel.max_ranks, processes, parallel.threads);
    std::tie(parallel.replica_ranks, parallel.replica_place) = ranks().replica();
  }

  void add_to(FlagSet& flags) {
    TransformerConfig::add_to(flags);
    flags.add("strategies", &strategies,
              {.help = "instead of one plan a table of several: all, or values of "
                       "parallel.strategy with commas between; hsdp:2 is hsdp with "
                       "parallel.shard_ranks=2, and so for other hybrids; empty: "
                       "parallel.strategy alone"});
    flags.add("parallel.processes", &processes,
              {.help = "processes that the ranks are thought to be in, each on a host of its own "
                       "and with parallel.threads of them, or parallel.ranks / processes: then the "
                       "plan says what these send each other",
               .min = 1,
               .max = parallel.max_ranks});
    flags.add("json", &json, {.help = "one JSON object instead of text"});
  }
};

// The trace, all that is written here, takes the place of no file of the training.
void check_trace(const PlanConfig& config, const FlagSet& flags) {
  const RunFile trace{"log.trace", resolve_user_path(config.log.trace)};
  const std::span<const RunFile> written(&trace, 1);
  check_files_differ(written,
                     config.files_read(flags, config.data.run_files(config.data.given_sources())));
  check_files_differ(written, config.save.files(config.lora.is_on()));
  std::vector<RunFile> files = RunLog::outputs(config);
  std::erase_if(files, [&](const RunFile& f) { return f.option == trace.option; });
  check_files_differ(written, files);
  const RunFile lock = RunLog::lock_of(config);
  check_files_differ(written, std::span(&lock, 1));
  config.checkpoint.check_apart(config.out, written);
}

// Every strategy of the list, with what else was asked for. An option that some of them have no use
// for is not theirs; what one refuses stands in its row.
std::vector<PlanRow> strategy_rows(const PlanConfig& config, const FlagSet& flags,
                                   LanguageModel& model) {
  std::vector<PlanRow> rows;
  for (const StrategyChoice& choice : parse_strategies(config.strategies)) {
    PlanConfig c = config;
    c.parallel.strategy = choice.strategy;
    require(choice.shard_ranks <= c.parallel.max_ranks,
            "[strategies] expected at most {} ranks that share one copy, got {}",
            c.parallel.max_ranks, choice.name);
    if (choice.shard_ranks > 0) c.parallel.shard_ranks = choice.shard_ranks;
    if (!c.parallel.preset().is_hybrid()) c.parallel.shard_ranks = 0;
    const PlanTarget target = plan_target(c.ranks(), c);
    try {
      c.validate(flags);
      rows.push_back(plan_row(choice.name, c, model, target));
    } catch (const engine::InvalidArgument& e) {
      rows.push_back({.name = choice.name, .refusal = e.what(), .target = target});
    }
  }
  return rows;
}

void say_strategies(const PlanConfig& config, const FlagSet& flags, LanguageModel& model) {
  require(config.log.trace.empty(),
          "[config] expected log.trace with the plan of one strategy, got it with strategies={}",
          config.strategies);
  const std::vector<PlanRow> rows = strategy_rows(config, flags, model);
  require(std::ranges::any_of(rows, &PlanRow::is_planned), "{}", rows.front().refusal);
  if (config.json) {
    fmt::print("{}\n", table_record(rows).text());
  } else {
    for (const std::string& line : table_lines(rows)) fmt::print("{}\n", line);
  }
  require(std::ranges::any_of(rows, &PlanRow::fits),
          "[memory_budget] expected a strategy that fits {}, got none", config.memory_budget);
}

void run(int argc, char** argv) {
  PlanConfig config;
  FlagSet flags(
      "plan",
      "Says what train_transformer would do with the same options: memory by category, "
      "collectives and bytes, simulated time. --strategies=all lays strategies "
      "side by side; --device=cuda plans for GPUs; "
      "--log.trace=FILE draws the planned steps, in simulated time. Takes the command "
      "line of a training as it is: what does not change a step, such as learning rates, "
      "samples, prompts, checkpoints and what is resumed, changes nothing here and is "
      "neither read nor written; of data, where they are there, the first bytes are read, "
      "to see whether it is data for the model.");
  config.add_to(flags);
  if (!flags.parse(argc, argv, std::cout)) return;
  require(config.plan || !flags.is_given("plan"),
          "[config] expected no plan=false of a program that only plans, got it");
  config.plan = true;  // as a trainer's
  if (config.strategies.empty()) {
    config.validate(flags);
  } else {  // each validates its own
    require(!flags.is_given("parallel.strategy"),
            "[config] expected strategies or parallel.strategy, got both");
    config.parallel.strategy =
        ParallelConfig().strategy;  // what a file says of it is not asked for
  }
  config.place_ranks();
  const Ranks ranks = config.ranks();
  const PlanTarget target = plan_target(ranks, config);
  if (config.strategies.empty()) {
    check_run(config, flags, ranks);
  } else {  // rows say what a strategy cannot do
    check_device(config, flags, ranks);
  }
  config.check_attention(target.on_gpus);
  choose_cpu(config.cpu);  // whose products have scratch
  const ModelConfig sizes = config.model_config();
  config.check_blocks(sizes.layers);
  for (const std::string& line : config.check_data_head(sizes)) {
    fmt::print(config.json ? stderr : stdout, "warning: {}\n", line);
  }
  config.settle_loss_mean(config.data.keeps_documents());
  static_cast<void>(uses_graphs(config, ranks.size, target.on_gpus));  // data have a say in it
  const std::unique_ptr<LanguageModel> owned = sizes.make();
  LanguageModel& model = *owned;
  if (!config.strategies.empty()) return say_strategies(config, flags, model);
  std::optional<engine::AtomicFile> trace_file;  // or throws, before anything is planned
  if (!config.log.trace.empty()) {
    check_trace(config, flags);
    trace_file.emplace(resolve_user_path(config.log.trace));
  }
  TrainConfig chosen = static_cast<const TrainConfig&>(config);
  std::optional<JsonRecord> budget_json;
  std::vector<std::string> budget_lines;
  if (const std::int64_t budget = config.memory_limit_nbytes(); budget > 0) {
    const BudgetPlan fitted = fit_transformer(config, model, target);
    chosen = fitted.config;
    budget_json = budget_record(fitted, budget);
    if (!config.json) budget_lines = lines_of(fitted, budget);
  }
  const std::string replicas = replicas_warning(chosen, ranks.size);
  const std::string shortage =
      check_shortage(transformer_shortage(config, chosen, model, ranks), chosen);
  TraceWriter trace(
      [&](std::string_view text) { trace_file->write(std::as_bytes(std::span(text))); });
  const TrainPlan plan =
      plan_transformer(config, chosen, model, target, trace_file ? &trace : nullptr);
  if (trace_file) trace_file->commit();
  if (config.json) {
    JsonRecord record = plan_record(plan, target);
    if (budget_json) record.add_literal("memory_budget", budget_json->text());
    std::vector<std::string> warnings;
    for (const std::string& line : {replicas, shortage}) {
      if (!line.empty()) warnings.push_back(engine::json_literal(line));
    }
    if (!warnings.empty()) {
      record.add_literal("warnings", fmt::format("[{}]", engine::join(warnings, ",")));
    }
    return fmt::print("{}\n", record.text());
  }
  // What is of this machine stands below what is not.
  const std::vector<std::string> above = {replicas}, below = {shortage};
  for (const std::vector<std::string>& lines :
       {above, budget_lines, plan_lines(plan, target), below}) {
    for (const std::string& line : lines) {
      if (!line.empty()) fmt::print("{}\n", line);
    }
  }
}

}  // namespace
}  // namespace tessera::tools

int main(int argc, char** argv) {
  return tessera::tools::run_main([&] { tessera::tools::run(argc, argv); });
}
