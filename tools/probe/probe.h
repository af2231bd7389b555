// Takes checksums of what a training step computes, on one rank: listens to the tape and to the
// units, and is told by the training loop where a step stands.
//
//   Probe probe({.rank = 0, .num_ranks = 4, .first_step = 1, .last_step = 5}, sink);
//   tape.listen(&probe);  FsdpOptions::step_listener = &probe;
//   probe.begin_step(1);
//   for (...) { probe.begin_micro_step(micro); ... backward }
//   fsdp.finish_step();   probe.on_reduced(fsdp);
//   optimizer.step(...);  probe.on_updated(fsdp, optimizer);
//   probe.end_step();
//
// It reads on the host, and on a GPU waits for each tensor; nothing is launched, sent, or allocated
// from the books, and no value changes. Between end_step() and begin_step(), and in other steps
// than those asked for, nothing is read.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/tape.h"
#include "shard/fsdp.h"
#include "shard/optimizer/optimizer.h"
#include "tools/probe/probe_record.h"

namespace tessera::tools {

struct ProbeOptions {
  int rank = 0;
  int num_ranks = 1;
  std::int64_t first_step = 1, last_step = 0;  ///< from 1
  std::optional<ProbeKey> target = {};  ///< this alone is recorded, with its values; of any step
};

class Probe : public engine::BorderListener, public shard::StepListener {
 public:
  /// What a step has left, in the rank's thread.
  using Sink = std::function<void(std::int64_t step, std::vector<ProbePart> parts)>;
  Probe(ProbeOptions options, Sink sink) : options_(std::move(options)), sink_(std::move(sink)) {}

  const ProbeOptions& options() const { return options_; }
  /// The step at work, from 1; 0: none that is recorded.
  std::int64_t step() const { return step_; }

  void begin_step(std::int64_t step);
  /// From 0, of this rank.
  virtual void begin_micro_step(std::int64_t micro);
  /// After Fsdp::finish_step(), before the update unless that is made during backward.
  virtual void on_reduced(const shard::Fsdp& fsdp);
  /// After the update.
  virtual void on_updated(const shard::Fsdp& fsdp, const shard::Optimizer& optimizer);
  /// Hands over what there is of it: after an error in a step, too.
  void end_step();

  void on_output(const engine::Block& block, std::size_t index, const engine::Tensor& output,
                 std::string_view phase) override;
  void on_output_gradient(const engine::Block& block, std::size_t index,
                          const engine::Tensor& gradient) override;
  void on_gathered(const shard::Unit& unit, std::string_view why) override;
  void on_gradient(const shard::Unit& unit) override;

 private:
  ProbePart part_of(ProbePhase phase, const std::string& tensor, const std::string& unit,
                    const engine::Shape& shape, engine::DType dtype) const;
  void take_whole(ProbePhase phase, const std::string& name, const std::string& unit,
                  const engine::Tensor& tensor);
  void take_owned(ProbePhase phase, const std::string& prefix, const shard::Unit& unit,
                  const shard::Flat& flat, const shard::SplitTensor& tensor);
  bool wants(const ProbeKey& key) const;
  void add(ProbePart part, std::span<const float> values);

  ProbeOptions options_;
  Sink sink_;
  std::int64_t step_ = 0;
  std::int64_t micro_batch_ = 0;  // of all ranks, from 1
  std::int64_t order_ = 0;
  std::map<std::pair<ProbePhase, std::string>, std::int64_t> visits_;  // of the micro-batch
  std::vector<ProbePart> parts_;
};

}  // namespace tessera::tools
