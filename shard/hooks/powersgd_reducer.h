// The reducer of powersgd.h: powersgd.cc reduces, powersgd_state.cc saves and loads.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/parameter.h"
#include "engine/stream.h"
#include "engine/tensor.h"
#include "shard/hooks/hook.h"
#include "shard/hooks/low_rank_layout.h"
#include "shard/hooks/powersgd.h"
#include "shard/hooks/scratch.h"
#include "shard/hooks/wire.h"

namespace tessera::shard {

/// Of one flat. Work of the context's stream throughout.
class PowerSgd final : public HookReducer {
 public:
  PowerSgd(const ReducerContext& context, const PowerSgdOptions& options, Wire wire,
           const ReducerFactory& uncompressed);

  void begin_step() override;
  bool takes_back() const override { return true; }
  void end_step(bool counts) override;
  void reduce(const engine::Tensor& in, const engine::Event& ready, bool is_last) override;
  bool remembers() const override { return options_.error_feedback || options_.warm_start; }
  bool has_more() const override { return !compresses_ && uncompressed_->has_more(); }
  void finish() override {
    if (!compresses_) uncompressed_->finish();
  }

  std::vector<HookTraffic> traffic() const override;
  std::int64_t error_nbytes(bool on_host) const override {
    if (!error_.defined() || on_host != options_.offload_error) return 0;
    return error_.nbytes() * (may_skip_ ? 2 : 1);
  }
  bool has_state() const override { return true; }
  std::vector<HookTensor> state() const override;
  std::optional<bool> takes(const HookTensorInfo& info) const override;
  void load(const HookState& of_all_ranks) override;

 private:
  const std::vector<LowRankMatrix>& matrices() const { return layout_.matrices(); }
  std::int64_t num_matrices() const { return std::ssize(layout_.matrices()); }
  // Gradients are summed inside replicas first.
  bool is_cut() const { return options_.across_replicas && mesh_.reduce().shard != nullptr; }
  const std::string& name_of(const LowRankMatrix& m) const;

  // What one reduction works with, in scratch. Tensors of a matrix are views of these.
  engine::Tensor message() const { return scratch_->get("message", {layout_.message_numel()}); }
  engine::Tensor new_qs() const { return scratch_->get("qs", {layout_.q_numel()}); }
  engine::Tensor input() const { return scratch_->get("input", {layout_.input_numel()}); }
  // What the step has read so far, and what it leaves, where work of the stream can use them.
  engine::Tensor old_error() const {
    if (options_.offload_error) return scratch_->get("error", error_.shape());
    return has_sum_ ? next_error_ : error_;
  }
  engine::Tensor new_error() const {
    return options_.offload_error ? scratch_->get("error", error_.shape()) : next_error_;
  }
  engine::Tensor m_of(const LowRankMatrix& m) const {
    return input().slice(m.input, {m.num_rows, m.cols});
  }
  engine::Tensor p_of(const LowRankMatrix& m) const {
    return message().slice(m.p, {m.rows, m.rank});
  }
  // The rows of P that this rank makes.
  engine::Tensor held_p_of(const LowRankMatrix& m) const {
    return message().slice(m.p + m.row_begin * m.rank, {m.num_rows, m.rank});
  }
  static engine::Tensor q_of(const LowRankMatrix& m, const engine::Tensor& qs) {
    return qs.slice(m.q, {m.cols, m.rank});
  }
  engine::Tensor bad_of(const LowRankMatrix& m) const {
    return scratch_->get("bad", {num_matrices()}).slice(&m - matrices().data(), {1});
  }

  void read(const engine::Tensor& in);
  void start_qs();
  void sum_ps();
  void sum_qs();
  void add_up();
  void add_to_sum(const LowRankPiece& piece, const engine::Tensor& values);

  std::string name_;
  std::vector<engine::Parameter*> parameters_;
  const Mesh& mesh_;
  engine::Stream stream_;
  Range range_, held_;  // what is kept of the sum, and what is compressed of the gradient
  PowerSgdOptions options_;
  Wire wire_;
  LowRankLayout layout_;
  int part_, num_parts_;  // of what is added up
  std::shared_ptr<Scratch> scratch_;
  WireSum wire_sum_;
  std::unique_ptr<Reducer> uncompressed_;  // of the steps before start_step
  // See [Note: steps that count for nothing].
  bool may_skip_;
  engine::Tensor error_;        // laid out as the input; what steps that count have left
  engine::Tensor next_error_;   // with may_skip_ what the step at work leaves, else the same tensor
  engine::Tensor qs_;           // (q_numel) f32
  engine::Tensor old_qs_;       // with may_skip_: before the step at work
  std::optional<bool> had_qs_;  // has_qs_ before the step at work, once it has changed Qs
  bool has_qs_ = false, has_sum_ = false, compresses_ = false;
  std::int64_t num_steps_ = 0;  // begun
};

}  // namespace tessera::shard
