#include "tools/programs/run/run_report.h"

#include <fmt/format.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>

#include "engine/io/text.h"
#include "tools/launch/ranks.h"
#include "tools/machine/limits.h"
#include "tools/planning/plan_report.h"
#include "tools/planning/task_plan.h"
#include "tools/report/advice.h"
#include "tools/train/task.h"

namespace tessera::tools {
namespace {

// Beside what rank 0 did, for the summary: the plan that was audited, or else one that is made now.
// There may be none, as of a model whose steps depend on values.
void add_plan(RunLog& log, const ProcessRun& run, std::int64_t start) {
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
}  // namespace

void report_run(RunLog& log, const ProcessRun& run, const RankResult& result) {
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
  JsonRecord end = ranks.record().add("data_digest", run.data_digest).add_all(result.end);
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

}  // namespace tessera::tools
