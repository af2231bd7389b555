// What a model learns in equal time under communication hooks, on links whose speed is stated.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/tape.h"
#include "shard/fsdp.h"
#include "shard/hooks/hooks.h"
#include "shard/optimizer/adamw.h"
#include "tools/bench/parts.h"
#include "tools/bench/training/link.h"
#include "tools/config/data/default_data.h"
#include "tools/data/token_dataset.h"
#include "tools/models/family.h"
#include "tools/rates/timing.h"

namespace tessera::tools {
namespace {

using engine::Tensor;

constexpr std::int64_t kSmoothed = 20;
constexpr double kNbytesPerS = 125e6;  // 1 Gbit/s
constexpr std::chrono::microseconds kLatency{50};

struct Way {
  const char* name;
  const char* hook;
  int rank = 0;  // of PowerSGD
};
constexpr Way kWays[] = {{"none", "none"},
                         {"bf16", "bf16"},
                         {"powersgd, rank 8", "powersgd", 8},
                         {"powersgd, rank 4", "powersgd", 4},
                         {"powersgd, rank 1", "powersgd", 1}};

// After each step, as rank 0 saw it.
struct Course {
  std::vector<double> ms, loss;
  double nbytes_per_step = 0;  // of the later half

  // Of the last steps that had ended by then.
  double loss_at(double then_ms) const {
    const auto end = std::ranges::upper_bound(ms, then_ms) - ms.begin();
    const auto begin = std::max<std::ptrdiff_t>(end - kSmoothed, 0);
    double sum = 0;
    for (auto i = begin; i < end; ++i) sum += loss[static_cast<std::size_t>(i)];
    return sum / static_cast<double>(end - begin);
  }
};

struct Training {
  const TrainingRow& row;
  std::int64_t num_steps;
  TokenDataset data;
};

void train(comm::ProcessGroup& world, const Link& link, const Way& way, const Training& training,
           Course& course) {
  const auto& [row, num_steps, data] = training;
  const auto compute = engine::Stream::inline_cpu("compute");
  const engine::Memory memory;
  engine::Tape tape(memory, compute);
  const std::unique_ptr<LanguageModel> model = row.model.make();
  shard::HookOptions hook;
  set_hook(hook, way.hook);
  hook.powersgd.start_step = num_steps / 10;
  if (way.rank > 0) hook.powersgd.low_rank.rank = way.rank;
  shard::Fsdp fsdp(world, memory, compute, model->blocks(), model->root(),
                   {.placement = shard::Placement::preset(row.strategy),
                    .reducer = make_hook(hook),
                    .reducer_text = describe(hook)});
  shard::AdamW optimizer(fsdp, {});
  const engine::Shape shape{row.batch, row.model.seq};
  const Tensor tokens = Tensor::empty(memory, shape, engine::DType::kI32, "tokens");
  const Tensor targets = Tensor::empty(memory, shape, engine::DType::kI32, "targets");
  const std::int64_t first_counted = num_steps / 2;
  double nbytes = 0;
  const Timer timer;
  for (std::int64_t step = 0; step < num_steps; ++step) {
    if (step == first_counted) nbytes = link.nbytes();
    data.batch((step * row.ranks + world.rank()) * row.batch, row.batch,
               tokens.span<std::int32_t>(), targets.span<std::int32_t>());
    fsdp.begin_step();
    const Tensor loss = model->loss(tape, {tokens, targets}, {});
    tape.backward(loss);
    const double warm = std::min(1.0, static_cast<double>(step + 1) / kSmoothed);
    optimizer.step(3e-3 * warm, fsdp.finish_step(), /*max_norm=*/1);
    course.loss.push_back(loss.item());
    course.ms.push_back(timer.ms());
  }
  course.nbytes_per_step =
      (link.nbytes() - nbytes) / static_cast<double>(num_steps - first_counted);
}

Course run(const Way& way, const Training& training) {
  const int num_ranks = training.row.ranks;
  std::vector<Course> courses(static_cast<std::size_t>(num_ranks));
  std::vector<std::unique_ptr<Link>> links;
  for (int r = 0; r < num_ranks; ++r)
    links.push_back(std::make_unique<Link>(kNbytesPerS, kLatency));
  comm::run_ranks(num_ranks, {}, [&](comm::ProcessGroup& world) {
    const auto rank = static_cast<std::size_t>(world.rank());
    LinkedGroup linked(world, *links[rank], [](std::string_view) { return false; });
    train(linked, *links[rank], way, training, courses[rank]);
  });
  return std::move(courses.front());
}

}  // namespace

void bench_hooks(const TrainingRow& base, std::int64_t num_steps, const BenchConfig& config,
                 BenchReport& report) {
  std::vector<std::size_t> wanted;
  for (std::size_t w = 0; w < std::size(kWays); ++w) {
    if (config.wants(fmt::format("hooks {}", kWays[w].name))) wanted.push_back(w);
  }
  if (wanted.empty()) return;
  const Training training{
      .row = base,
      .num_steps = num_steps,
      .data = TokenDataset(TokenFile(kDefaultText), {.seq = base.model.seq,
                                                     .vocab = base.model.vocab,
                                                     .order = SampleOrder::kShuffle,
                                                     .seed = 1})};
  std::vector<Course> courses;
  for (const std::size_t w : wanted) courses.push_back(run(kWays[w], training));
  double shortest_ms = courses.front().ms.back();
  for (const Course& c : courses) shortest_ms = std::min(shortest_ms, c.ms.back());
  report.begin_table(
      "hooks",
      fmt::format("{}x{}, {} ranks, {}, {} steps of {} sequences a rank of {}, links of {:.0f} "
                  "Gbit/s and {} us; mb: sent by a rank in a step; loss_then: when the first of "
                  "them is done, of {:.1f} s; losses are means of {} steps",
                  base.model.layers, base.model.dim, base.ranks, base.strategy, num_steps,
                  base.batch, std::filesystem::path(kDefaultText).filename().string(),
                  kNbytesPerS * 8e-9, kLatency.count(), shortest_ms * 1e-3, kSmoothed),
      {"hook", "mb", "step_ms", "seconds", "loss", "steps_then", "loss_then"});
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const Course& c = courses[i];
    std::vector<double> step_ms;
    for (std::size_t s = c.ms.size() / 2; s < c.ms.size(); ++s)
      step_ms.push_back(c.ms[s] - c.ms[s - 1]);
    report.row({kWays[wanted[i]].name, Cell(c.nbytes_per_step * 1e-6, 3), median(step_ms),
                c.ms.back() * 1e-3, Cell(c.loss_at(c.ms.back()), 3),
                std::ranges::upper_bound(c.ms, shortest_ms) - c.ms.begin(),
                Cell(c.loss_at(shortest_ms), 3)});
  }
}

}  // namespace tessera::tools
