#include "tools/planning/planner.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "comm/hybrid/traffic.h"
#include "comm/meta.h"
#include "engine/cuda.h"
#include "engine/device.h"
#include "engine/error.h"
#include "engine/gemm/gemm_algorithms.h"
#include "engine/memory.h"
#include "tools/planning/peak_blocks.h"
#include "tools/trace/trace.h"
#include "tools/train/trainer.h"

namespace tessera::tools {

namespace {

constexpr std::int64_t kNumSteps = 2;  // those that differ, and one more

// What is launched on the compute stream, and where memory peaks; told to a trace as well.
class ComputeLog final : public engine::LaunchListener {
 public:
  struct Launch {
    std::int64_t begin_ns, end_ns;
  };

  explicit ComputeLog(TraceRecorder* trace) : trace_(trace) {}

  void watch(const engine::Memory& memory) { memory_ = &memory; }
  /// Throws what went wrong while work was launched, where nothing may be thrown.
  void check() const {
    if (failure_ != nullptr) std::rethrow_exception(failure_);
  }
  void begin() {
    launches.clear();
    most_ = 0;
    peak_at.clear();
  }
  std::optional<std::uint64_t> on_enqueue(const engine::LaunchRequest& request) noexcept override {
    try {
      look(request);
    } catch (...) {
      failure_ = std::current_exception();
    }
    return trace_ == nullptr ? 0 : trace_->on_enqueue(request).value_or(0);
  }
  void on_launch(const engine::LaunchRecord& record) noexcept override {
    try {
      launches.push_back({record.begin_ns, record.end_ns});
    } catch (...) {
      failure_ = std::current_exception();
    }
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
  std::exception_ptr failure_;
};

struct Called {
  PlannedCollective collective;
  std::int64_t begin_ns, end_ns;  // on the link
};

// Where `groups` has `ranks`, which are added if need be: thousands of collectives of thousands of
// ranks share a few lists.
std::size_t index_of(const std::vector<int>& ranks, std::vector<std::vector<int>>& groups) {
  const auto found = std::ranges::find(groups, ranks);
  if (found != groups.end()) return static_cast<std::size_t>(found - groups.begin());
  groups.push_back(ranks);
  return groups.size() - 1;
}

// How long the link carries so many bytes; see [Note: simulated time].
std::int64_t link_ns(const engine::MetaRates& rates, std::int64_t nbytes) {
  return static_cast<std::int64_t>(
      1e9 * (rates.link_latency_s + static_cast<double>(nbytes) / rates.link_bytes_per_s));
}

// [Note: what compute waits for]
// A wait that ends when a collective does may have gone by with others: the norm of the gradient is
// gathered after the last reductions, and is there soon after them. The link carries one
// collective at a time, so each has of the wait what it was on the link for. What is left, in which
// nothing was sent, is of the one that ends it: a copy of the host's that it had to wait for. What
// the step before gathered ahead counts with what this one does for the next: in the long run the
// same.
//
// In a step that begins at `begin_ns`.
void find_exposed(std::int64_t begin_ns, const std::vector<ComputeLog::Launch>& launches,
                  const std::vector<Called>& ahead, std::vector<Called>& called) {
  struct Sent {
    std::int64_t begin_ns, end_ns;
    PlannedCollective* counts;  // null: nothing alike in this step
  };
  std::vector<Sent> sent;  // in the order of the link, and of calls
  std::map<std::pair<std::string_view, std::string_view>, PlannedCollective*> last_alike;
  for (Called& c : called) last_alike[{c.collective.name, c.collective.label}] = &c.collective;
  for (const Called& c : ahead) {
    if (c.end_ns <= begin_ns || c.collective.bytes_sent == 0) continue;
    const auto alike = last_alike.find({c.collective.name, c.collective.label});
    sent.push_back({c.begin_ns, c.end_ns, alike == last_alike.end() ? nullptr : alike->second});
  }
  for (Called& c : called) {
    if (c.collective.bytes_sent > 0) sent.push_back({c.begin_ns, c.end_ns, &c.collective});
  }
  // Searched once for each launch, of which micro-steps make many: the first that ends then.
  std::unordered_map<std::int64_t, const Sent*> ended;
  for (const Sent& s : sent) ended.try_emplace(s.end_ns, &s);
  const auto add = [](const Sent& to, std::int64_t ns) {
    if (to.counts != nullptr) to.counts->exposed_ms += static_cast<double>(ns) * 1e-6;
  };
  std::int64_t from = begin_ns;
  auto next = sent.begin();  // the first that is not over at `from`
  for (const ComputeLog::Launch& launch : launches) {
    const std::int64_t begin = from, to = launch.begin_ns;
    from = launch.end_ns;
    if (to <= begin) continue;
    const auto last = ended.find(to);
    if (last == ended.end()) continue;
    while (next != sent.end() && next->end_ns <= begin) ++next;
    std::int64_t rest = to - begin;
    for (auto s = next; s != sent.end() && s->begin_ns < to; ++s) {
      const std::int64_t ns = std::min(s->end_ns, to) - std::max(s->begin_ns, begin);
      if (ns <= 0) continue;
      add(*s, ns);
      rest -= ns;
    }
    if (rest > 0) add(*last->second, rest);
  }
}

}  // namespace

const StepRecord& planned_step(const TrainPlan& plan, std::int64_t step, std::int64_t start) {
  const std::int64_t from = plan.compresses_after;
  const bool is_first = step == start + 1;
  if (from == 0) return plan.steps[is_first ? 0 : 1];
  if (start >= from) return plan.resumed[is_first ? 0 : 1];
  const std::size_t num_before = plan.steps.size() - kNumSteps;
  if (step <= from) return plan.steps[is_first ? 0 : num_before - 1];
  return plan.steps[step == from + 1 ? num_before : num_before + 1];
}

std::int64_t peak_nbytes(const TrainPlan& plan) {
  const StepRecord& last = plan.repeated ? *plan.repeated : plan.steps.back();
  std::int64_t most = std::max({plan.steps.back().memory.peak_total_nbytes,
                                last.memory.peak_total_nbytes, plan.between_steps_nbytes});
  for (const PlannedPass& pass : plan.unrecorded) most = std::max(most, pass.nbytes);
  return most;
}

namespace {

engine::Stream compute_of(const PlanTarget& target, const engine::StreamOptions& options) {
  engine::require<engine::DeviceError>(
      engine::kCudaBuilt || !target.on_gpus,
      "[plan] expected a build with CUDA for a plan of GPUs, got one without: build where a CUDA "
      "Toolkit is, and without NO_CUDA (device=cuda)");
  return engine::Stream::meta("compute",
                              target.on_gpus ? engine::DeviceKind::kCuda : engine::DeviceKind::kCpu,
                              target.rates, options);
}

// The most that Fsdp::full_parameter() takes, which reads them at the end: a whole f32 parameter,
// and a copy of what this rank owns of it where some of that lies on the host.
std::int64_t whole_parameter_nbytes(const shard::Fsdp& fsdp) {
  std::int64_t most = 0;
  for (const auto& unit : fsdp.units()) {
    for (const shard::Flat& flat : unit->flats()) {
      for (const engine::Parameter* p : flat.parameters) {
        const std::int64_t numel = p->shape.numel();
        const std::int64_t copied = flat.master.has_host() ? std::min(numel, flat.owned.numel) *
                                                                 size_of(flat.master.dtype())
                                                           : 0;
        most = std::max(most, 4 * numel + copied);
      }
    }
  }
  return most;
}

// After the steps of `trainer`.
PlannedPass plan_unrecorded(const UnrecordedPass& pass, Trainer& trainer) {
  engine::Memory memory = trainer.tape().memory();
  memory.reset_peaks();
  const Batch batch = empty_batch(memory, pass.tensors);
  trainer.tape().no_grad([&] { pass.run(trainer.tape(), batch); });
  return {pass.name, memory.stats().peak_total_nbytes};
}

// What a process sends to others on average, for all groups that its ranks are in as `ranks` are.
std::int64_t bytes_between(const comm::Collective& c, const std::vector<int>& ranks,
                           const PlanTarget& target) {
  if (target.num_processes == 1) return 0;
  std::map<int, int> num_ranks;
  for (const int rank : ranks) ++num_ranks[rank / target.ranks_per_process()];
  std::vector<int> each;
  for (const auto& [process, count] : num_ranks) each.push_back(count);
  const auto num_groups = target.num_ranks / std::ssize(ranks);
  return num_groups * comm::bytes_between_processes(c, each) / target.num_processes;
}

// The plan of the first `num_steps` steps. `repeats_last`: see Trainer::plan().
TrainPlan plan_steps(const TrainConfig& config, std::int64_t num_steps, const PlanTarget& target,
                     Model& model, const std::vector<BatchTensor>& batch, TraceWriter* trace,
                     bool repeats_last = false,
                     const std::vector<UnrecordedPass>& unrecorded = {}) {
  std::optional<TraceRecorder> recorder;
  if (trace != nullptr)
    recorder.emplace(*trace,
                     TraceOptions{.process_name = fmt::format("rank {}, planned", target.rank)});
  TraceRecorder* const traced = recorder ? &*recorder : nullptr;
  ComputeLog log(traced);
  std::vector<Called> called, ahead;
  std::vector<std::vector<int>> groups;
  const auto world = comm::make_meta_rank(
      target.rank, target.num_ranks,
      {.sums_in_rank_order = target.sums_in_rank_order,
       .stages = target.stages,
       .ranks_per_process = target.ranks_per_process(),
       .on_collective = [&, rates = target.rates](const comm::Collective& c,
                                                  const std::vector<int>& ranks,
                                                  const engine::Stream& stream) {
         const std::int64_t end_ns = meta_now_ns(stream);
         called.push_back({{.name = std::string(c.work.name),
                            .label = c.work.detail,
                            .bytes_sent = c.work.bytes_sent,
                            .group = index_of(ranks, groups),
                            .end_ms = 0,
                            .bytes_between = bytes_between(c, ranks, target)},
                           end_ns - link_ns(rates, c.work.bytes_sent),
                           end_ns});
       }});
  const auto compute = compute_of(target, {.listener = &log});
  if constexpr (engine::kCudaBuilt) {
    if (target.gemms != nullptr && target.on_gpus) engine::record_gemms(compute, target.gemms);
  }
  const auto blocks = std::make_shared<PeakBlocks>();
  const auto host_blocks = std::make_shared<PeakBlocks>();
  Trainer trainer(*world, compute, config, model.blocks(), model.root(), /*log=*/nullptr,
                  {.trace = traced, .memory = blocks, .host_memory = host_blocks});
  log.watch(trainer.tape().memory());

  std::int64_t begin_ns = 0;
  std::chrono::steady_clock::time_point begin;
  const auto before_step = [&](std::int64_t) {
    log.begin();
    blocks->begin();
    host_blocks->begin();
    ahead = std::exchange(called, {});
    begin_ns = meta_now_ns(compute);
    begin = std::chrono::steady_clock::now();
  };
  const auto loss = [&](std::int64_t first_sample, const Batch& tensors) {
    return model.loss(trainer.tape(), tensors,
                      {.recompute = config.train.recompute,
                       .seed = static_cast<std::uint64_t>(config.train.seed),
                       .first_sample = first_sample,
                       .is_sum = config.train.sums_losses()});
  };
  TrainPlan plan;
  plan.steps = trainer.plan(batch, loss, num_steps, before_step, repeats_last);
  log.check();
  plan.host_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  if (recorder) {
    recorder->finish();
    trace->close();
  }
  plan.hash = trainer.fsdp().plan_hash();
  plan.facts = trainer.fsdp().plan();
  plan.peak_at = log.peak_at;
  plan.uses_offload = trainer.fsdp().offload() != nullptr || config.comm.powersgd.offload_error;
  plan.between_steps_nbytes =
      trainer.tape().memory().stats().total_nbytes + whole_parameter_nbytes(trainer.fsdp());
  plan.num_launches = std::ssize(log.launches) + std::ssize(called);
  plan.groups = std::move(groups);
  find_exposed(begin_ns, log.launches, ahead, called);
  for (Called& c : called) {
    c.collective.end_ms = static_cast<double>(c.end_ns - begin_ns) * 1e-6;
    plan.collectives.push_back(std::move(c.collective));
  }
  const MemoryTerms terms = memory_terms(trainer.fsdp(), trainer.num_optimizer_states());
  const StepRecord& step = plan.steps.back();
  plan.memory = planned_memory(step.step_memory, terms.device, *blocks, trainer.fsdp());
  plan.host_memory =
      planned_memory(step.step_host_memory, terms.host, *host_blocks, trainer.fsdp());
  for (const UnrecordedPass& pass : unrecorded)
    plan.unrecorded.push_back(plan_unrecorded(pass, trainer));
  return plan;
}

// After how many steps a hook begins to compress in this training; 0: at once, or never.
std::int64_t compresses_after(const TrainConfig& config) {
  if (!config.comm.options().compresses()) return 0;
  const std::int64_t start = config.comm.powersgd.start_step;
  return start < config.train.steps ? start : 0;
}

}  // namespace

TrainPlan make_plan(const TrainConfig& config, const PlanTarget& target, Model& model,
                    const std::vector<BatchTensor>& batch, TraceWriter* trace,
                    const std::vector<UnrecordedPass>& unrecorded) {
  const std::int64_t after = compresses_after(config);
  if (after == 0) {
    // A trace is of the steps alone.
    TrainPlan plan = plan_steps(config, kNumSteps, target, model, batch, trace, false,
                                trace == nullptr ? unrecorded : std::vector<UnrecordedPass>());
    if (trace != nullptr && !unrecorded.empty()) {
      plan.unrecorded =
          plan_steps(config, kNumSteps, target, model, batch, nullptr, false, unrecorded)
              .unrecorded;
    }
    if (config.train.guards()) {
      plan.repeated = plan_steps(config, kNumSteps, target, model, batch, nullptr,
                                 /*repeats_last=*/true)
                          .steps.back();
    }
    return plan;
  }
  // Steps before it are alike but for the first, so two of them stand for all.
  TrainConfig sooner = config;
  std::int64_t& start = sooner.comm.powersgd.start_step;
  start = std::min<std::int64_t>(after, 2);
  TrainPlan plan = plan_steps(sooner, start + kNumSteps, target, model, batch, trace);
  start = 0;
  TrainPlan resumed =
      plan_steps(sooner, kNumSteps, target, model, batch, nullptr, false, unrecorded);
  plan.resumed = std::move(resumed.steps);
  plan.unrecorded = std::move(resumed.unrecorded);
  plan.compresses_after = after;
  // What ranks agree on names the step.
  TrainPlan whole = plan_steps(config, 1, target, model, batch, nullptr);
  plan.hash = whole.hash;
  plan.facts = std::move(whole.facts);
  return plan;
}

}  // namespace tessera::tools
