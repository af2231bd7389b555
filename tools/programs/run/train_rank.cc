#include "tools/programs/run/train_rank.h"

#include <chrono>
#include <exception>
#include <memory>

#include "comm/host_gather.h"
#include "engine/cuda.h"
#include "engine/gemm/gemm_algorithms.h"
#include "engine/memory.h"
#include "engine/stream.h"
#include "tools/launch/arithmetic.h"
#include "tools/launch/product_rate.h"
#include "tools/launch/ranks.h"
#include "tools/planning/plan_report.h"
#include "tools/planning/task_plan.h"
#include "tools/report/hook_report.h"
#include "tools/report/rank_errors.h"
#include "tools/train/task.h"
#include "tools/train/unmet_requests.h"

namespace tessera::tools {
namespace {

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

}  // namespace

RankResult train_rank(comm::ProcessGroup& all, const ProcessRun& run, RunLog* log) {
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
  return told(world, [&]() -> RankResult {
    rank->load(trainer, log);
    const TrainPosition start = trainer.open_checkpoints(run.identity());
    if (trace != nullptr) trace->start_after(start.step, world.rank());
    if (run.probe != nullptr) {
      run.probe->describe(run.data_digest, arithmetic_values(run.arithmetic()));
      run.probe->start_after(start.step, world, compute);
    }
    if (audit != nullptr) audit->start_after(start.step);
    if (audit != nullptr) trainer.on_step([audit](const StepRecord& step) { audit->add(step); });
    const HookReport hook(trainer.fsdp(), config.comm.options());
    const auto loss = [&](std::int64_t first_sample, const Batch& batch) {
      return model.loss(trainer.tape(), batch,
                        {.recompute = config.train.recompute,
                         .seed = static_cast<std::uint64_t>(config.train.seed),
                         .first_sample = first_sample,
                         .samples_before = trainer.samples_before(),
                         .is_sum = config.train.sums_losses()});
    };
    std::optional<double> peak_flop_per_s;
    if (ranks.num_gpus == 0 && config.log.peak_ms > 0) {
      peak_flop_per_s = product_flop_per_s(world, config.precision.param,
                                           std::chrono::milliseconds(config.log.peak_ms));
    }
    world.barrier("loaded");  // only now can no rank fail to start
    if (world.rank() == ranks.local.first) run.flight.remove_earlier();
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
    if (ranks.are_processes() && ranks.num_gpus == 0) late.emplace(run.flight.recorder());
    if (log != nullptr && late) log->add_to_steps([&late] { return late->step(); });
    trainer.run(rank->data(), loss, rank->validation(trainer), task.items().per_sample);
    if (run.probe != nullptr) run.probe->end(world, compute);
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

}  // namespace tessera::tools
