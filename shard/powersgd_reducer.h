// The reducer of powersgd.h: powersgd.cc reduces, powersgd_state.cc saves and loads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/parameter.h"
#include "engine/stream.h"
#include "engine/tensor.h"
#include "shard/hook.h"
#include "shard/low_rank_layout.h"
#include "shard/powersgd.h"
#include "shard/scratch.h"
#include "shard/wire.h"

namespace tessera::shard {

/// Of one flat. Work of the context's stream throughout.
class PowerSgd final : public HookReducer {
 public:
  PowerSgd(const ReducerContext& context, const PowerSgdOptions& options, Wire wire,
           const ReducerFactory& uncompressed);

  void begin_step() override;
  void reduce(const engine::Tensor& in, const engine::Event& ready, bool is_last) override;
  bool remembers() const override { return options_.error_feedback || options_.warm_start; }
  bool has_more() const override { return !compresses_ && uncompressed_->has_more(); }
  void finish() override {
    if (!compresses_) uncompressed_->finish();
  }

  std::vector<HookTraffic> traffic() const override;
  std::int64_t error_nbytes(bool on_host) const override {
    return error_.defined() && on_host == options_.offload_error ? error_.nbytes() : 0;
  }
  bool has_state() const override { return true; }
  std::vector<HookTensor> state() const override;
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
  engine::Tensor error() const {
    return options_.offload_error ? scratch_->get("error", error_.shape()) : error_;
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
  engine::Tensor error_;                   // laid out as the input
  engine::Tensor qs_;                      // (q_numel) f32
  bool has_qs_ = false, has_sum_ = false, compresses_ = false;
  std::int64_t num_steps_ = 0;  // begun
};

}  // namespace tessera::shard
