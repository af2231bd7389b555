// A training in process with probes, one of which may change a bit on its way: a fault of the
// engine as a search for divergence must find it.
#pragma once

#include <bit>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/testing/temp_folder.h"
#include "tests/tools/testing/gpt_run.h"
#include "tools/probe/probe.h"
#include "tools/report/run_probe.h"

namespace tessera::testing {

/// The lowest bit of element `index` of the tensor, where a rank meets it as `key` says.
struct Fault {
  tools::ProbeKey key;
  std::int64_t index = 0;
  int rank = -1;  ///< this one alone; -1: all that have it
};

/// Changes the bit before the probe looks: through the same calls by which it listens.
class FaultyProbe : public tools::Probe {
 public:
  FaultyProbe(const tools::ProbeOptions& options, Sink sink, const Fault& fault)
      : Probe(options, std::move(sink)), fault_(fault) {}

  void on_output(const engine::Block& block, std::size_t index, const engine::Tensor& output,
                 std::string_view phase) override {
    if (is_at(tools::ProbePhase::kOutput, block.name + ".output")) flip(output, fault_.index);
    Probe::on_output(block, index, output, phase);
  }
  void on_output_gradient(const engine::Block& block, std::size_t index,
                          const engine::Tensor& gradient) override {
    if (is_at(tools::ProbePhase::kOutputGradient, block.name + ".output")) {
      flip(gradient, fault_.index);
    }
    Probe::on_output_gradient(block, index, gradient);
  }
  void on_gathered(const shard::Unit& unit, std::string_view why) override {
    const bool forward = why == "forward";
    for (const engine::Parameter* p : parameters_of(unit)) {
      if (is_at(
              forward ? tools::ProbePhase::kGatheredForward : tools::ProbePhase::kGatheredBackward,
              p->name)) {
        flip(p->value, fault_.index);
      }
    }
    Probe::on_gathered(unit, why);
  }
  void on_gradient(const shard::Unit& unit) override {
    for (const engine::Parameter* p : parameters_of(unit)) {
      if (is_at(tools::ProbePhase::kGradient, p->name)) flip(p->grad, fault_.index);
    }
    Probe::on_gradient(unit);
  }
  void on_reduced(const shard::Fsdp& fsdp) override {
    micro_ = -1;
    flip_owned(tools::ProbePhase::kReduced, "", fsdp,
               [](const shard::Flat& flat) { return flat.grad_sum; });
    Probe::on_reduced(fsdp);
  }
  void on_updated(const shard::Fsdp& fsdp, const shard::Optimizer& optimizer) override {
    flip_owned(tools::ProbePhase::kUpdated, "", fsdp,
               [](const shard::Flat& flat) { return flat.master; });
    for (const std::string& name : optimizer.state_names()) {
      flip_owned(tools::ProbePhase::kState, name + " of ", fsdp, [&](const shard::Flat& flat) {
        return optimizer.state({flat, 0}, name);
      });
    }
    Probe::on_updated(fsdp, optimizer);
  }
  void begin_micro_step(std::int64_t micro) override {
    micro_ = micro;
    Probe::begin_micro_step(micro);
  }

 private:
  static std::vector<const engine::Parameter*> parameters_of(const shard::Unit& unit) {
    std::vector<const engine::Parameter*> all;
    for (const shard::Flat& flat : unit.flats()) {
      all.insert(all.end(), flat.parameters.begin(), flat.parameters.end());
    }
    return all;
  }
  static void flip(const engine::Tensor& t, std::int64_t index) {
    float& x = t.data<float>()[index];
    x = std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) ^ 1u);
  }
  bool is_at(tools::ProbePhase phase, const std::string& tensor) const {
    const std::int64_t micro_batch =
        micro_ < 0 ? 0 : micro_ * options().num_ranks + options().rank + 1;
    const tools::ProbeKey& key = fault_.key;
    return key.phase == phase && key.tensor == tensor && key.step == step() &&
           key.micro_batch == micro_batch && (fault_.rank < 0 || fault_.rank == options().rank);
  }
  template <class F>
  void flip_owned(tools::ProbePhase phase, const std::string& prefix, const shard::Fsdp& fsdp,
                  const F& owned_of) const {
    for (const auto& unit : fsdp.units()) {
      for (const shard::Flat& flat : unit->flats()) {
        for (const shard::Segment& s : flat.segments) {
          const std::int64_t at = fault_.index - s.parameter_begin;
          const std::string& name = flat.parameters[s.parameter]->name;
          if (is_at(phase, prefix + name) && at >= 0 && at < s.numel) {
            flip(owned_of(flat).device(), s.shard_begin + at);
          }
        }
      }
    }
  }

  Fault fault_;
  std::int64_t micro_ = -1;
};

/// The record of a training, written and read again, and what the training left.
struct ProbedRun {
  tools::ProbeRun record;
  GptRun gpt;
};

inline ProbedRun run_probed(const tools::TrainConfig& config, const tools::GptConfig& model,
                            const tools::TokenDataset& data, const Fault& fault = {},
                            const std::optional<tools::ProbeKey>& target = {},
                            CollectiveLog* calls = nullptr) {
  const int num_ranks = static_cast<int>(config.parallel.ranks);
  const tools::StepRange steps = config.probe_steps();
  std::string text = header_text(tools::probe_header(config, num_ranks, "{}"));
  std::int64_t num_parts = 0;
  std::mutex mutex;
  const auto sink = [&](std::int64_t, const std::vector<tools::ProbePart>& parts) {
    const std::lock_guard lock(mutex);
    for (const tools::ProbePart& part : parts) text += part_text(part);
    num_parts += std::ssize(parts);
  };
  ProbedRun run;
  run.gpt = run_gpt(config, model, data, "", calls, [&](int rank) {
    return std::make_unique<FaultyProbe>(
        tools::ProbeOptions{.rank = rank,
                            .num_ranks = num_ranks,
                            .first_step = steps.first,
                            .last_step = target ? target->step : steps.last,
                            .target = target},
        sink, fault);
  });
  text += tools::end_text(target ? target->step : steps.last, num_parts);
  const TempFolder folder;
  run.record = tools::read_probe_run(folder.write("probe.jsonl", text));
  return run;
}

}  // namespace tessera::testing
