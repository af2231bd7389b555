#include "shard/grad_norm.h"

#include <bit>
#include <cmath>
#include <limits>
#include <span>
#include <utility>

#include "comm/host_gather.h"
#include "engine/copy.h"
#include "engine/elementwise.h"
#include "engine/error.h"
#include "shard/norm.h"
#include "shard/norm_words.h"

namespace tessera::shard {

using engine::Category;
using engine::DType;
using engine::Stream;
using engine::Tensor;

namespace {

// Every rank's `mine`, rank by rank, once `compute` gets there; `mine` if one owns everything.
Tensor gather(const UnitContext& context, const Stream& compute, const Tensor& mine) {
  comm::ProcessGroup* group = context.mesh.group_of(context.options.placement.optimizer);
  if (group == nullptr) return mine;
  context.gather.wait(compute.record("norm"));
  Tensor all = comm::gather_values(*group, mine, context.gather, "norm");
  compute.wait(context.gather.record("gathered"));
  return all;
}

// fn(flat, index of its first parameter among all trainable ones)
template <class F>
void for_each_trainable(const std::vector<std::unique_ptr<Unit>>& units, F fn) {
  std::int64_t first = 0;
  for (const auto& unit : units) {
    const Flat* flat = unit->trainable();
    if (flat == nullptr) continue;
    fn(*flat, first);
    first += static_cast<std::int64_t>(flat->parameters.size());
  }
}

// On the CPU: (1 + index of a parameter whose gradient is not finite, sum of squares). On a meta
// device without reading anything.
void reduce_on_cpu(const UnitContext& context, const Stream& compute,
                   const std::vector<std::unique_ptr<Unit>>& units, double mean_scale,
                   const Tensor& norm) {
  const bool is_meta = compute.device().is_meta;
  std::int64_t numel = 0, fault = 0;
  for_each_trainable(units, [&](const Flat& flat, auto) { numel += flat.layout.value_numel(); });
  SquareSum sum(numel);
  for (const auto& unit : units) compute.wait(unit->sum_stored());
  compute.synchronize();  // the host reads the sums
  for_each_trainable(units, [&](const Flat& flat, std::int64_t first) {
    for (const Segment& s : flat.segments) {
      if (is_meta) break;
      const SplitTensor g = flat.grad_sum.slice(s.shard_begin, s.numel);
      for (const Tensor* part : {&g.device(), &g.host()}) {
        if (fault != 0 || !part->defined() || sum.try_add(part->span<float>())) continue;
        fault = first + static_cast<std::int64_t>(s.parameter) + 1;
      }
    }
  });
  constexpr std::int64_t kNumWords = 1 + SquareSum::kNumWords;
  const Tensor mine =
      Tensor::empty(context.memory, {kNumWords}, DType::kI64, "norm", Category::kCommunication);
  if (!is_meta) {
    std::ranges::copy(sum.words(), mine.span<std::int64_t>().begin() + 1);
    mine.span<std::int64_t>()[0] = fault;
  }
  const Tensor all = gather(context, compute, mine);
  compute.synchronize();
  if (is_meta) return;
  SquareSum total(numel);
  const std::span<const std::int64_t> words = all.span<std::int64_t>();
  fault = 0;
  for (std::size_t at = 0; at < words.size(); at += kNumWords) {
    if (fault == 0) fault = words[at];
    total.add(SquareSum::from_words(words.subspan(at + 1, SquareSum::kNumWords), numel));
  }
  const auto value = static_cast<float>(std::sqrt(total.total()) * mean_scale);
  norm.span<std::int32_t>()[0] = std::bit_cast<std::int32_t>(value);
  norm.span<std::int32_t>()[1] = static_cast<std::int32_t>(fault);
}

// The norm on a GPU, without the host: the result is in `norm` once `compute` gets there.
void reduce_on_gpu(const UnitContext& context, const Stream& compute,
                   const std::vector<std::unique_ptr<Unit>>& units, double mean_scale,
                   const Tensor& norm) {
  // Sums that lie on the host were added when they were final.
  const Tensor mine = make_norm_words(context.memory);
  if (context.norm_words.defined()) {
    engine::copy(mine, context.norm_words, compute, "norm.start");
  } else {
    engine::launch_fill(compute, mine, 0, "norm.clear");
  }
  for_each_trainable(units, [&](const Flat& flat, std::int64_t first) {
    if (flat.has_own_squares) return;
    add_squares(compute, mine, flat, flat.grad_sum.device(), first);
  });
  const Tensor all = gather(context, compute, mine);
  finish_norm(compute, norm, all, mean_scale);
}

Tensor empty_norm(const engine::Memory& memory) {
  return Tensor::empty(memory, {2}, DType::kI32, "norm", Category::kWorkspace);
}

}  // namespace

bool GradNorm::is_known() const { return state_->copied.reached(); }

float GradNorm::value() const {
  const std::string where = not_finite();
  engine::require(where.empty(), "[fsdp] expected finite gradients, got NaN or infinity ({})",
                  where);
  return std::bit_cast<float>(state_->on_host.span<std::int32_t>()[0]);
}

std::optional<float> GradNorm::State::finite_value() const {
  const auto words = on_host.span<std::int32_t>();
  if (words[1] != 0) return std::nullopt;
  return std::bit_cast<float>(words[0]);
}

std::optional<float> GradNorm::unchecked_value() const {
  state_->copied.wait();
  return state_->finite_value();
}

std::function<std::optional<float>()> GradNorm::unchecked_value_for_host() const {
  return [state = state_.get(), copied = state_->copied.for_host()] {
    copied.wait();
    return state->finite_value();
  };
}

std::string GradNorm::not_finite() const {
  engine::require(state_->on_host.defined(),
                  "[fsdp] expected Fsdp::read_norm() of a captured step, got its norm read");
  state_->copied.wait();
  if (state_->on_device.defined())
    state_->group->check();  // an aborted gather ends without an error
  const std::int32_t fault = state_->on_host.span<std::int32_t>()[1];
  if (fault == 0) return {};
  std::string where = state_->findings ? state_->check->describe(*state_->findings) : "";
  if (!where.empty()) return where;
  return state_->parameters.at(static_cast<std::size_t>(fault - 1))->name;
}

GradNorm reduce_norm(const UnitContext& context, const Stream& compute,
                     const std::vector<std::unique_ptr<Unit>>& units, double mean_scale) {
  auto state = std::make_shared<GradNorm::State>();
  state->group = &context.mesh.world();
  for_each_trainable(units, [&](const Flat& flat, auto) {
    state->parameters.insert(state->parameters.end(), flat.parameters.begin(),
                             flat.parameters.end());
  });
  const bool is_captured = compute.is_capturing();
  if (!is_captured) state->on_host = empty_norm(context.pinned);
  if (context.check != nullptr) {
    context.gather.wait(compute.record("gradient_check"));
    state->check = context.check;
    state->findings.emplace(
        context.check->gather(context.mesh.world(), context.gather, context.pinned));
    compute.wait(context.gather.record("gradient_check"));  // what it reads may go
  }
  if (!compute.device().is_cuda()) {
    reduce_on_cpu(context, compute, units, mean_scale, state->on_host);
    GradNorm norm(std::move(state));
    const bool throws = context.options.non_finite == NonFinite::kThrow;
    if (throws && !compute.device().is_meta) static_cast<void>(norm.value());
    return norm;
  }
  state->on_device = empty_norm(context.memory);
  reduce_on_gpu(context, compute, units, mean_scale, state->on_device);
  GradNorm norm(std::move(state));
  if (!is_captured) norm.read(compute);
  return norm;
}

void GradNorm::read(const Stream& compute) {
  engine::copy(state_->on_host, state_->on_device, compute, "norm.copy");
  state_->copied = compute.record("norm copied");
}

GradNorm copy_norm(const UnitContext& context, const Stream& compute, const GradNorm& norm) {
  auto state = std::make_shared<GradNorm::State>(*norm.state_);
  state->on_device = empty_norm(context.memory);
  state->on_host = empty_norm(context.pinned);
  engine::copy(state->on_device, norm.on_device(), compute, "norm.keep");
  GradNorm copied(std::move(state));
  copied.read(compute);
  return copied;
}

double clip_scale(float norm, double max_norm) {
  if (max_norm <= 0) return 1;
  return std::min(1.0, max_norm / (double{norm} + 1e-6));
}

}  // namespace tessera::shard
