#include "shard/hooks/powersgd.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "engine/copy.h"
#include "engine/elementwise.h"
#include "engine/error.h"
#include "engine/gemm/gemm.h"
#include "engine/gemm/gemm_cuda.h"
#include "engine/philox.h"
#include "shard/hooks/hook_kernels.h"
#include "shard/hooks/powersgd_reducer.h"
#include "shard/hooks/scratch.h"

namespace tessera::shard {

using comm::Accumulate;
using engine::Category;
using engine::DType;
using engine::Event;
using engine::RandomStream;
using engine::require;
using engine::Tensor;

// [Note: what is not finite]
// A gradient that is not finite makes P so, on every rank alike, since products and sums spread it.
// Ranks see that in the sum that all of them have, and do the same: the sum of the gradient is not
// a number, for Fsdp to find, and error and Q stay what they were. A gradient whose elements are
// finite and whose sums overflow ends in the same way.
//
// [Note: the error to the bit]
// M, D and E are f32 tensors of their own, so fl(G + E) = M and fl(M - D) = new E hold to the bit,
// whatever rounds on the wire: P and Q are what the ranks agreed on. M = D + E in real numbers
// where M - D needs no rounding, so wherever D lies between M / 2 and 2 M, and within half a unit
// in the last place of E elsewhere.
//
// [Note: steps that count for nothing]
// Whether a step's update is skipped is known after its last reduction, when every error has moved
// on. So where it may be, a step writes its errors beside the old ones, and the two are exchanged
// when it is known to count: no copy, but the memory of another error. Qs, which are small, are
// copied before a step changes them.

namespace {

// The words of a step's random numbers: another sequence for each matrix and step.
RandomStream random_of(std::uint64_t seed, const std::string& name, std::int64_t step) {
  return {seed, engine::fnv1a(name) + static_cast<std::uint64_t>(step) * 0x9E3779B97F4A7C15ull};
}

// c = a b, where `a_transposed` and `b_transposed` say how they are stored.
void launch_product(const engine::Stream& stream, const engine::Memory& workspace, const Tensor& c,
                    const Tensor& a, bool a_transposed, const Tensor& b, bool b_transposed,
                    const std::string& detail) {
  const auto view = [](const Tensor& t, bool transposed) {
    const auto stored = engine::matrix<const float>(t, t.dim(0), t.dim(1));
    return transposed ? stored.t() : stored;
  };
  const auto left = view(a, a_transposed), right = view(b, b_transposed);
  const auto out = engine::matrix<float>(c, c.dim(0), c.dim(1));
  stream.launch(
      {.name = "powersgd.product",
       .flops = engine::gemm_flops(left.rows, right.cols, left.cols),
       .bytes_read = a.nbytes() + b.nbytes(),
       .bytes_written = c.nbytes(),
       .detail = detail},
      [a, b, c, left, right, out] { engine::gemm(left, right, out, /*accumulate=*/false); },
      [&](const auto& on) {
        const auto matrix = [](const Tensor& t, bool transposed) {
          const auto stored = engine::device_matrix(t, t.dim(0), t.dim(1));
          return transposed ? stored.t() : stored;
        };
        engine::gemm_cuda(
            on, workspace,
            {.a = matrix(a, a_transposed), .b = matrix(b, b_transposed), .c = matrix(c, false)});
      });
}

std::vector<engine::Shape> shapes_of(const std::vector<engine::Parameter*>& parameters) {
  std::vector<engine::Shape> shapes;
  for (const engine::Parameter* p : parameters) shapes.push_back(p->shape);
  return shapes;
}

}  // namespace

PowerSgd::PowerSgd(const ReducerContext& context, const PowerSgdOptions& options, Wire wire,
                   const ReducerFactory& uncompressed)
    : HookReducer(context),
      name_(context.name),
      parameters_(context.parameters),
      mesh_(context.mesh),
      stream_(context.stream),
      range_(context.range),
      held_(options.across_replicas ? range_ : Range{0, context.layout.flat_numel()}),
      options_(options),
      wire_(wire),
      layout_(shapes_of(parameters_), context.layout, held_, options.low_rank),
      part_(options.across_replicas ? mesh_.replica() : mesh_.world().rank()),
      num_parts_(options.across_replicas ? mesh_.num_replicas() : mesh_.world().size()),
      scratch_(Scratch::of(context.stream, context.memory)),
      wire_sum_(wire, mesh_.reduce(), std::max(layout_.message_numel(), layout_.q_numel()),
                *scratch_),
      may_skip_(context.may_skip) {
  ReducerContext shared = context;
  shared.sum = sum();
  uncompressed_ = uncompressed(shared);
  scratch_->reserve("input", layout_.input_numel(), DType::kF32);
  scratch_->reserve("decompressed", layout_.max_numel(), DType::kF32);
  scratch_->reserve("message", layout_.message_numel(), DType::kF32);
  scratch_->reserve("qs", layout_.q_numel(), DType::kF32);
  scratch_->reserve("bad", num_matrices(), DType::kI64);
  if (is_cut()) scratch_->reserve("part", range_.numel, DType::kF32);
  qs_ = Tensor::empty(context.memory, {layout_.q_numel()}, DType::kF32, name_ + ".powersgd.q",
                      Category::kCommunication);
  if (may_skip_) {
    old_qs_ = Tensor::empty(context.memory, {layout_.q_numel()}, DType::kF32,
                            name_ + ".powersgd.old_q", Category::kCommunication);
  }
  if (!options.error_feedback) return;
  const auto make_error = [&](const char* name) {
    return Tensor::zeros(options.offload_error ? context.pinned : context.memory,
                         {layout_.input_numel()}, options.error_dtype, name_ + name,
                         Category::kCommunication);
  };
  error_ = make_error(".powersgd.error");
  next_error_ = may_skip_ ? make_error(".powersgd.next_error") : error_;
  if (options.offload_error) {
    scratch_->reserve("error", layout_.input_numel(), options.error_dtype);
  }
}

void PowerSgd::begin_step() {
  compresses_ = num_steps_ >= options_.start_step;
  ++num_steps_;
  has_sum_ = false;
  had_qs_.reset();
  uncompressed_->begin_step();
}

void PowerSgd::end_step(bool counts) {
  if (counts) {
    if (has_sum_) std::swap(error_, next_error_);
    return;
  }
  --num_steps_;
  if (!had_qs_) return;
  has_qs_ = *had_qs_;
  std::swap(qs_, old_qs_);
}

const std::string& PowerSgd::name_of(const LowRankMatrix& m) const {
  if (options_.low_rank.batched) return name_;
  return parameters_[m.parameter]->name;
}

void PowerSgd::reduce(const Tensor& in, const Event& ready, bool is_last) {
  if (!compresses_) return uncompressed_->reduce(in, ready, is_last);
  stream_.wait(ready);
  read(in);
  start_qs();
  sum_ps();
  sum_qs();
  add_up();
  has_sum_ = true;
}

// M = G + E, and what is sent as it is.
void PowerSgd::read(const Tensor& in) {
  Tensor source = in;
  if (is_cut()) {
    source = scratch_->get("part", {range_.numel});
    mesh_.reduce().shard->reduce_scatter(in, source, Accumulate::kNo, stream_, name_ + " gradient");
  }
  const std::int64_t first = is_cut() ? range_.begin : 0;
  if (error_.defined() && options_.offload_error) {
    engine::copy(old_error(), has_sum_ ? next_error_ : error_, stream_, "powersgd.fetch_error");
  }
  // What other ranks have, or nobody.
  engine::launch_fill(stream_, message(), 0, "powersgd.clear", name_);
  for (const LowRankMatrix& m : matrices()) {
    const std::int64_t end = m.begin + m.numel, all = m.num_rows * m.cols;
    for (const Range gap : {Range{0, m.begin}, Range{end, all - end}}) {
      if (gap.numel == 0) continue;
      engine::launch_fill(stream_, input().slice(m.input + gap.begin, {gap.numel}), 0,
                          "powersgd.clear", name_);
    }
  }
  for (const LowRankPiece& piece : layout_.pieces()) {
    const std::string& parameter = parameters_[piece.parameter]->name;
    const Tensor gradient = source.slice(piece.flat - first, {piece.numel});
    if (!piece.matrix) {
      engine::launch_assign_or_add(stream_, message().slice(piece.at, {piece.numel}), gradient,
                                   false, "powersgd.plain", parameter);
      continue;
    }
    launch_add_error(stream_, input().slice(piece.at, {piece.numel}), gradient,
                     error_.defined() ? old_error().slice(piece.at, {piece.numel}) : Tensor(),
                     parameter);
  }
}

void PowerSgd::start_qs() {
  if (may_skip_ && !had_qs_) {
    had_qs_ = has_qs_;
    if (has_qs_) engine::copy(old_qs_, qs_, stream_, "powersgd.keep_q");
  }
  const bool draws = !std::exchange(has_qs_, true) || !options_.warm_start;
  for (const LowRankMatrix& m : matrices()) {
    const Tensor q = q_of(m, qs_);
    const RandomStream random = random_of(options_.seed, name_of(m), num_steps_);
    if (draws) launch_draw(stream_, q, random, name_of(m));
    launch_orthonormalize(stream_, q, options_.orthogonalize_eps,
                          {.replaced = true, .random = random}, {}, name_of(m));
  }
}

void PowerSgd::sum_ps() {
  for (const LowRankMatrix& m : matrices()) {
    if (m.num_rows == 0) continue;
    launch_product(stream_, scratch_->workspace(), held_p_of(m), m_of(m), false, q_of(m, qs_),
                   false, name_of(m));
  }
  wire_sum_.all_reduce(message(), stream_, name_ + " powersgd P");
  for (const LowRankMatrix& m : matrices()) {
    engine::launch_fill(stream_, bad_of(m), 0, "powersgd.clear", name_of(m));
    launch_look(stream_, bad_of(m), p_of(m), name_of(m));
    launch_orthonormalize(stream_, p_of(m), options_.orthogonalize_eps, {}, bad_of(m), name_of(m));
  }
}

void PowerSgd::sum_qs() {
  for (const LowRankMatrix& m : matrices()) {
    const Tensor q = q_of(m, new_qs());
    if (m.num_rows == 0) {
      engine::launch_fill(stream_, q, 0, "powersgd.clear", name_of(m));
      continue;
    }
    launch_product(stream_, scratch_->workspace(), q, m_of(m), true, held_p_of(m), false,
                   name_of(m));
  }
  wire_sum_.all_reduce(new_qs(), stream_, name_ + " powersgd Q");
  for (const LowRankMatrix& m : matrices()) {
    const Tensor q = q_of(m, new_qs());
    launch_look(stream_, bad_of(m), q, name_of(m));
    launch_mean(stream_, q, num_parts_, q_of(m, qs_), bad_of(m), name_of(m));
  }
}

// D = P Q^T of one matrix after the other, into the sum and out of the error.
void PowerSgd::add_up() {
  std::optional<std::size_t> ready;
  for (const LowRankPiece& piece : layout_.pieces()) {
    if (!piece.matrix) {
      add_to_sum(piece, message().slice(piece.at, {piece.numel}));
      continue;
    }
    const LowRankMatrix& m = matrices()[*piece.matrix];
    const Tensor decompressed = scratch_->get("decompressed", {m.num_rows, m.cols});
    if (ready != piece.matrix) {
      launch_product(stream_, scratch_->workspace(), decompressed, held_p_of(m), false,
                     q_of(m, new_qs()), true, name_of(m));
      ready = piece.matrix;
    }
    const Tensor values = decompressed.slice(piece.at - m.input, {piece.numel});
    add_to_sum(piece, values);
    if (!error_.defined()) continue;
    launch_keep_error(stream_, new_error().slice(piece.at, {piece.numel}),
                      old_error().slice(piece.at, {piece.numel}),
                      input().slice(piece.at, {piece.numel}), values, bad_of(m),
                      parameters_[piece.parameter]->name);
  }
  if (error_.defined() && options_.offload_error) {
    engine::copy(next_error_, new_error(), stream_, "powersgd.store_error");
  }
}

// What this rank keeps of a piece: of a matrix the mean times how many were added, otherwise sums.
void PowerSgd::add_to_sum(const LowRankPiece& piece, const Tensor& values) {
  const std::int64_t begin = std::max(piece.flat, range_.begin);
  const std::int64_t numel =
      std::min(piece.flat + piece.numel, range_.begin + range_.numel) - begin;
  if (numel <= 0) return;
  const Tensor sum = sum_.slice(begin - range_.begin, {numel});
  const Tensor mine = values.slice(begin - piece.flat, {numel});
  const std::string& parameter = parameters_[piece.parameter]->name;
  if (!piece.matrix) {
    return engine::launch_assign_or_add(stream_, sum, mine, has_sum_, "powersgd.plain", parameter);
  }
  launch_add_decompressed(stream_, sum, mine, num_parts_, has_sum_,
                          bad_of(matrices()[*piece.matrix]), parameter);
}

std::unique_ptr<Reducer> make_powersgd(const ReducerContext& context,
                                       const PowerSgdOptions& options, Wire wire,
                                       const ReducerFactory& uncompressed) {
  require(options.start_step >= 0, "[powersgd] expected a start_step of at least 0, got {}",
          options.start_step);
  require(options.orthogonalize_eps >= 0,
          "[powersgd] expected an orthogonalize_eps of at least 0, got {}",
          options.orthogonalize_eps);
  require(options.error_dtype == DType::kF32 || options.error_dtype == DType::kBF16,
          "[powersgd] expected errors in f32 or bf16, got {}",
          engine::name_of(options.error_dtype));
  require(
      !options.across_replicas || context.place != Place::kWhole,
      "[powersgd] expected across_replicas where gradients are cut inside replicas, got it with "
      "whole ones ({})",
      context.name);
  require(!options.across_replicas || context.mesh.num_replicas() > 1,
          "[powersgd] expected across_replicas with more than one replica, got one ({})",
          context.name);
  return std::make_unique<PowerSgd>(context, options, wire, uncompressed);
}

}  // namespace tessera::shard
