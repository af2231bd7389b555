#include "tools/train/planner.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <ranges>
#include <utility>

#include "comm/meta.h"
#include "engine/cuda.h"
#include "engine/gemm/gemm_algorithms.h"
#include "engine/io/text.h"
#include "tools/trace/trace.h"
#include "tools/train/peak_blocks.h"
#include "tools/train/trainer.h"

namespace tessera::tools {

using engine::Category;
using engine::size_of;
using shard::Place;

namespace {

constexpr std::int64_t kNumSteps = 2;     // those that differ, and one more
constexpr std::ptrdiff_t kMaxKinds = 16;  // of blocks that a category's arithmetic names

// What is launched on the compute stream, and where memory peaks; told to a trace as well.
class ComputeLog final : public engine::LaunchListener {
 public:
  struct Launch {
    std::int64_t begin_ns, end_ns;
  };

  explicit ComputeLog(TraceRecorder* trace) : trace_(trace) {}

  void watch(const engine::Memory& memory) { memory_ = &memory; }
  void begin() {
    launches.clear();
    most_ = 0;
    peak_at.clear();
  }
  std::optional<std::uint64_t> on_enqueue(const engine::LaunchRequest& request) noexcept override {
    look(request);
    return trace_ == nullptr ? 0 : trace_->on_enqueue(request).value_or(0);
  }
  void on_launch(const engine::LaunchRecord& record) noexcept override {
    launches.push_back({record.begin_ns, record.end_ns});
    if (trace_ != nullptr) trace_->on_launch(record);
  }

  std::vector<Launch> launches;
  std::string peak_at;

 private:
  void look(const engine::LaunchRequest& request) {
    if (memory_ == nullptr) return;
    const std::int64_t nbytes = memory_->stats().total_nbytes;
    if (nbytes <= most_) return;
    most_ = nbytes;
    const auto& [block, phase] = request.scope;
    peak_at = fmt::format("{}{}{}", request.work.name, block.empty() ? "" : ", ", block);
    if (!block.empty()) peak_at += fmt::format(" {}", phase);
  }

  TraceRecorder* const trace_;
  const engine::Memory* memory_ = nullptr;
  std::int64_t most_ = 0;
};

struct Called {
  PlannedCollective collective;
  std::int64_t end_ns;
};

std::string slots_text(int count) { return fmt::format("{} slot{}", count, count == 1 ? "" : "s"); }

std::string over(int parts) { return parts == 1 ? "" : fmt::format(" / {}", parts); }

// Elements of a kind of flat, over all units.
struct Elements {
  std::int64_t whole = 0, mine = 0;
  int parts = 1;
};

// The arithmetic of what Fsdp and its optimizer hold, apart from what is offloaded.
std::map<Category, std::vector<PlanTerm>> terms_of(const shard::Fsdp& fsdp, int num_states) {
  const shard::FsdpOptions& options = fsdp.options();
  const shard::Mesh& mesh = fsdp.mesh();
  const shard::Precision& precision = options.precision;
  Elements masters, wires, sums;
  std::int64_t max_gathered = 0, max_gradient = 0, root_gathered = 0, root_gradient = 0;
  std::int64_t sum_gathered = 0;
  int num_units = 0;
  for (const auto& unit : fsdp.units()) {
    for (const shard::Flat& flat : unit->flats()) {
      const std::int64_t whole = flat.layout.flat_numel();
      const bool has_master = flat.trainable && precision.param != engine::DType::kF32;
      wires.whole += whole;
      wires.mine += flat.parameter_range.numel;
      wires.parts = mesh.num_parts(options.placement.parameters);
      if (!flat.trainable) continue;
      if (has_master) {
        masters.whole += whole;
        masters.mine += flat.owned.numel;
      }
      masters.parts = mesh.num_parts(options.placement.optimizer);
      sums.whole += whole;
      sums.mine += flat.gradient_range.numel;
      sums.parts = mesh.num_parts(options.placement.gradients);
    }
    std::int64_t& gathered = unit->is_root() ? root_gathered : max_gathered;
    std::int64_t& gradient = unit->is_root() ? root_gradient : max_gradient;
    gathered = std::max(gathered, unit->gathered_nbytes());
    gradient = std::max(gradient, unit->gradient_nbytes());
    if (unit->is_root()) continue;
    ++num_units;
    sum_gathered += unit->gathered_nbytes();
  }
  std::map<Category, std::vector<PlanTerm>> terms;
  const auto add = [&](Category category, std::string text, std::int64_t nbytes) {
    if (nbytes > 0) terms[category].push_back({std::move(text), nbytes});
  };
  const auto slots = [&](int ahead) { return std::min(ahead, num_units - 1) + 1; };
  add(Category::kParameterShard,
      fmt::format("parameters {} B x {}{}", size_of(precision.param),
                  engine::with_commas(wires.whole), over(wires.parts)),
      wires.mine * size_of(precision.param));
  add(Category::kParameterShard,
      fmt::format("f32 masters 4 B x {}{}", engine::with_commas(masters.whole),
                  over(masters.parts)),
      masters.mine * 4);
  if (options.placement.reshard_after_forward) {
    const int count = slots(options.prefetch);
    add(Category::kGatheredParameter,
        fmt::format("{} x {} B, the largest unit (prefetch + 1)", slots_text(count),
                    engine::with_commas(max_gathered)),
        count * max_gathered);
  } else {
    add(Category::kGatheredParameter, fmt::format("all {} units, kept after forward", num_units),
        sum_gathered);
  }
  add(Category::kGatheredParameter,
      fmt::format("the root {} B", engine::with_commas(root_gathered)), root_gathered);
  const int gradient_slots = slots(options.reductions_in_flight);
  add(Category::kGradient,
      fmt::format("{} x {} B, the largest unit (reductions in flight + 1)",
                  slots_text(gradient_slots), engine::with_commas(max_gradient)),
      gradient_slots * max_gradient);
  add(Category::kGradient, fmt::format("the root {} B", engine::with_commas(root_gradient)),
      root_gradient);
  add(Category::kGradient,
      fmt::format("sums 4 B x {}{}", engine::with_commas(sums.whole), over(sums.parts)),
      sums.mine * 4);
  std::int64_t owned = 0;
  for (const auto& unit : fsdp.units()) {
    for (const shard::Flat& flat : unit->flats()) owned += flat.trainable ? flat.owned.numel : 0;
  }
  add(Category::kOptimizer,
      fmt::format("{} states x 4 B x {}{}", num_states, engine::with_commas(sums.whole),
                  over(masters.parts)),
      num_states * 4 * owned);
  return terms;
}

// The same of what the model and the kernels make of it: what is there, the largest first. Small
// blocks of many kinds are one term.
std::vector<PlanTerm> terms_of(const std::vector<PeakBlocks::Kind>& kinds) {
  std::vector<PlanTerm> terms;
  for (const PeakBlocks::Kind& kind : kinds | std::views::take(kMaxKinds)) {
    terms.push_back({fmt::format("{} x {}", kind.count, kind.what), kind.count * kind.nbytes});
  }
  std::int64_t count = 0, nbytes = 0;
  for (const PeakBlocks::Kind& kind : kinds | std::views::drop(kMaxKinds)) {
    count += kind.count;
    nbytes += kind.count * kind.nbytes;
  }
  if (nbytes > 0)
    terms.push_back({fmt::format("{} smaller block{}", count, count == 1 ? "" : "s"), nbytes});
  return terms;
}

// Which waits of compute, in a step that begins at `begin_ns`, end when a collective does. What the
// step before gathered ahead counts with what this one does for the next: in the long run the same.
void find_exposed(std::int64_t begin_ns, const std::vector<ComputeLog::Launch>& launches,
                  const std::vector<Called>& ahead, std::vector<Called>& called) {
  const auto last_alike = [&](const Called& c) {
    return std::find_if(called.rbegin(), called.rend(), [&](const Called& other) {
      return other.collective.name == c.collective.name &&
             other.collective.label == c.collective.label;
    });
  };
  std::int64_t from = begin_ns;
  for (const ComputeLog::Launch& launch : launches) {
    const std::int64_t to = launch.begin_ns, waited = to - from;
    from = launch.end_ns;
    if (waited <= 0) continue;
    const double waited_ms = static_cast<double>(waited) * 1e-6;
    if (const auto own = std::ranges::find(called, to, &Called::end_ns); own != called.end()) {
      own->collective.exposed_ms += waited_ms;
      continue;
    }
    const auto early = std::ranges::find(ahead, to, &Called::end_ns);
    if (early == ahead.end()) continue;
    if (const auto own = last_alike(*early); own != called.rend()) {
      own->collective.exposed_ms += waited_ms;
    }
  }
}

}  // namespace

const StepRecord& planned_step(const TrainPlan& plan, std::int64_t step, std::int64_t start) {
  const std::int64_t from = plan.compresses_behind;
  const bool is_first = step == start + 1;
  if (from == 0) return plan.steps[is_first ? 0 : 1];
  if (start >= from) return plan.resumed[is_first ? 0 : 1];
  const std::size_t num_before = plan.steps.size() - kNumSteps;
  if (step <= from) return plan.steps[is_first ? 0 : num_before - 1];
  return plan.steps[step == from + 1 ? num_before : num_before + 1];
}

std::int64_t peak_nbytes(const TrainPlan& plan) {
  return std::max(plan.steps.back().memory.peak_total_nbytes, plan.between_steps_nbytes);
}

namespace {

// The plan of the first `num_steps` steps.
TrainPlan plan_steps(const TrainConfig& config, std::int64_t num_steps, const PlanTarget& target,
                     Model& model, const std::vector<BatchTensor>& batch, TraceWriter* trace) {
  std::optional<TraceRecorder> recorder;
  if (trace != nullptr)
    recorder.emplace(*trace,
                     TraceOptions{.process_name = fmt::format("rank {}, planned", target.rank)});
  TraceRecorder* const traced = recorder ? &*recorder : nullptr;
  ComputeLog log(traced);
  std::vector<Called> called, ahead;
  const auto world = comm::make_meta_rank(
      target.rank, target.num_ranks,
      {.sums_in_rank_order = target.sums_in_rank_order,
       .is_nccl = target.is_nccl,
       .on_collective = [&called](const comm::Collective& c, const std::vector<int>& ranks,
                                  const engine::Stream& stream) {
         called.push_back({{.name = std::string(c.work.name),
                            .label = c.work.detail,
                            .bytes_sent = c.work.bytes_sent,
                            .ranks = ranks,
                            .end_ms = 0},
                           meta_now_ns(stream)});
       }});
  const auto compute = engine::Stream::meta(
      "compute", target.on_gpus ? engine::DeviceKind::kCuda : engine::DeviceKind::kCpu,
      target.rates, {.listener = &log});
  if constexpr (engine::kCudaBuilt) {
    if (target.gemms != nullptr && target.on_gpus) engine::record_gemms(compute, target.gemms);
  }
  const auto blocks = std::make_shared<PeakBlocks>();
  Trainer trainer(*world, compute, config, model.blocks(), model.root(), /*log=*/nullptr, traced,
                  /*probe=*/nullptr, blocks);
  log.watch(trainer.tape().memory());

  std::int64_t begin_ns = 0;
  std::chrono::steady_clock::time_point begin;
  const auto before_step = [&](std::int64_t) {
    log.begin();
    blocks->begin();
    ahead = std::exchange(called, {});
    begin_ns = meta_now_ns(compute);
    begin = std::chrono::steady_clock::now();
  };
  const auto loss = [&](std::int64_t first_sample, const Batch& tensors) {
    return model.loss(trainer.tape(), tensors,
                      {.recompute = config.train.recompute,
                       .seed = static_cast<std::uint64_t>(config.train.seed),
                       .first_sample = first_sample});
  };
  TrainPlan plan;
  plan.steps = trainer.plan(batch, loss, num_steps, before_step);
  plan.host_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  if (recorder) {
    recorder->finish();
    trace->close();
  }
  plan.hash = trainer.fsdp().plan_hash();
  plan.facts = trainer.fsdp().plan();
  plan.peak_at = log.peak_at;
  // Fsdp::full_parameter(), as at the end; what is offloaded is copied first.
  std::int64_t max_numel = 0;
  for (const engine::Parameter* p : trainer.fsdp().parameters()) {
    max_numel = std::max(max_numel, p->shape.numel());
  }
  const int copies = trainer.fsdp().offload() == nullptr ? 1 : 2;
  plan.between_steps_nbytes = trainer.tape().memory().stats().total_nbytes + copies * 4 * max_numel;
  plan.num_launches = std::ssize(log.launches) + std::ssize(called);
  find_exposed(begin_ns, log.launches, ahead, called);
  for (Called& c : called) {
    c.collective.end_ms = static_cast<double>(c.end_ns - begin_ns) * 1e-6;
    plan.collectives.push_back(std::move(c.collective));
  }
  auto terms = terms_of(trainer.fsdp(), trainer.num_optimizer_states());
  const engine::MemoryStats& memory = plan.steps.back().step_memory;
  for (int i = 0; i < engine::kNumCategories; ++i) {
    const auto category = static_cast<Category>(i);
    if (terms[category].empty()) terms[category] = terms_of(blocks->most(category));
    plan.memory.push_back(
        {category, memory.peak_nbytes[static_cast<std::size_t>(i)], std::move(terms[category])});
  }
  return plan;
}

// After how many steps a hook begins to compress in this training; 0: at once, or never.
std::int64_t compresses_behind(const TrainConfig& config) {
  if (!config.comm.options().compresses()) return 0;
  const std::int64_t start = config.comm.powersgd.start_step;
  return start < config.train.steps ? start : 0;
}

}  // namespace

TrainPlan make_plan(const TrainConfig& config, const PlanTarget& target, Model& model,
                    const std::vector<BatchTensor>& batch, TraceWriter* trace) {
  const std::int64_t behind = compresses_behind(config);
  if (behind == 0) return plan_steps(config, kNumSteps, target, model, batch, trace);
  // Steps before it are alike but for the first, so two of them stand for all.
  TrainConfig sooner = config;
  std::int64_t& start = sooner.comm.powersgd.start_step;
  start = std::min<std::int64_t>(behind, 2);
  TrainPlan plan = plan_steps(sooner, start + kNumSteps, target, model, batch, trace);
  start = 0;
  plan.resumed = plan_steps(sooner, kNumSteps, target, model, batch, nullptr).steps;
  plan.compresses_behind = behind;
  // What ranks agree on names the step.
  TrainPlan whole = plan_steps(config, 1, target, model, batch, nullptr);
  plan.hash = whole.hash;
  plan.facts = std::move(whole.facts);
  return plan;
}

}  // namespace tessera::tools
