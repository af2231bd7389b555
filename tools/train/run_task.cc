#include "tools/train/run_task.h"

#include <fmt/core.h>

#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "comm/process_group.h"
#include "tools/io/file.h"
#include "tools/io/text.h"
#include "tools/train/cpu.h"
#include "tools/train/ranks.h"
#include "tools/train/stop.h"

namespace tessera::tools {
namespace {

struct Result {
  std::string params_sha256;
  std::optional<Trainer::Validation> validation;
  std::string sample;
  JsonRecord end;
};

Result train_rank(comm::ProcessGroup& world, const Ranks& ranks, const Task& task, RunLog* log) {
  const TrainConfig& config = task.config();
  const std::unique_ptr<TaskRank> rank = task.rank();
  Model& model = rank->model();
  Trainer trainer(world, ranks.compute(world.rank()), config, model.blocks(), model.root(), log);
  rank->load(trainer, log);
  const auto loss = [&](std::int64_t first_sample, const Batch& batch) {
    return model.loss(trainer.tape(), batch,
                      {.recompute = config.train.recompute,
                       .seed = static_cast<std::uint64_t>(config.train.seed),
                       .first_sample = first_sample});
  };
  world.barrier("loaded");  // only now can no rank fail to start
  if (log != nullptr) {
    const auto pause = world.pause_deadline();
    log->begin();
  }
  trainer.run(rank->data(), loss, rank->validation(trainer), task.items().per_sample);
  return {.params_sha256 = trainer.params_sha256(),
          .validation = trainer.validation(),
          .sample = rank->finish(trainer, log),
          .end = trainer.end_record()};
}

// Says and writes what the run leaves.
void report(RunLog& log, const Task& task, const Ranks& ranks, const Result& result) {
  if (!result.sample.empty()) {
    log.say(fmt::format(
        "\n---- generated -----------------------------------------------------------\n{}\n"
        "--------------------------------------------------------------------------\n",
        result.sample));
  }
  const auto& validation = result.validation;
  if (validation && !validation->summary.empty()) log.say(validation->summary);
  log.say(fmt::format("parameters sha256 {}\nlog {}\nfiles in {}", result.params_sha256,
                      escaped(log.jsonl_path()), escaped(log.folder())));
  if (const std::string line = task.closing_line(); !line.empty()) log.say(line);
  JsonRecord end = ranks.record().add_all(result.end);
  if (validation) end.add_all(validation->record);
  log.finish(result.params_sha256, validation ? std::optional(validation->loss) : std::nullopt,
             end);
  if (!result.sample.empty()) log.write_file("sample.txt", result.sample + "\n");
}

}  // namespace

void run_task(int argc, char** argv, FlagSet flags, Task& task) {
  task.add_to(flags);
  if (!flags.parse(argc, argv, std::cout)) return;
  const TrainConfig& config = task.config();
  config.validate(flags);
  choose_cpu(config.cpu);
  const Ranks ranks = Ranks::choose(config);
  check_pins(config.cpu, ranks.size);
  task.prepare(flags);
  std::optional<StopSignals> signals;  // from the start of the ranks to the very end
  RunLog log(config, task.items().name, flags.to_toml());
  if (task.samples()) AtomicFile(log.folder() + "/sample.txt");  // or throws, before training
  log.say(task.summary());
  log.say("device: " + ranks.str());
  Result result;
  signals.emplace();
  ranks.run(config, [&](comm::ProcessGroup& world) {
    const bool is_first = world.rank() == 0;
    pin_rank(config.cpu, world.rank());
    Result mine = train_rank(world, ranks, task, is_first ? &log : nullptr);
    if (is_first) result = std::move(mine);
  });
  report(log, task, ranks, result);
}

}  // namespace tessera::tools
