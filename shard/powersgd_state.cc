#include <algorithm>
#include <string_view>

#include "engine/copy.h"
#include "engine/elementwise.h"
#include "engine/error.h"
#include "shard/powersgd_reducer.h"

namespace tessera::shard {

using engine::require;
using engine::Tensor;

namespace {

constexpr std::int64_t kExact = std::int64_t{1} << 24;  // integers below are exact in f32

const HookTensor* find(std::span<const HookTensor> tensors, std::string_view name,
                       const std::string& parameter) {
  const auto found = std::ranges::find_if(
      tensors, [&](const HookTensor& t) { return t.name == name && t.parameter == parameter; });
  return found == tensors.end() ? nullptr : &*found;
}

std::vector<float> floats_of(const Tensor& t) {
  return engine::dispatch_float(t.dtype(), "powersgd", [&](auto type) {
    const auto stored = engine::to_vector<decltype(type)>(t);
    std::vector<float> values(stored.size());
    engine::cast(values.data(), stored.data(), t.numel());
    return values;
  });
}

}  // namespace

std::vector<HookTraffic> PowerSgd::traffic() const {
  std::vector<HookTraffic> traffic;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const LowRankLayout::Sent sent = layout_.sent(i);
    traffic.push_back({parameters_[i], sent.rank,
                       4 * static_cast<double>(parameters_[i]->shape.numel()),
                       static_cast<double>(size_of(wire_)) * sent.numel});
  }
  return traffic;
}

std::vector<HookTensor> PowerSgd::state() const {
  std::vector<HookTensor> tensors;
  for (const LowRankPiece& piece : layout_.pieces()) {
    if (!piece.matrix || !error_.defined()) continue;
    tensors.push_back({.name = "powersgd.error",
                       .parameter = parameters_[piece.parameter]->name,
                       .part = part_,
                       .num_parts = num_parts_,
                       .begin = piece.parameter_begin,
                       .values = floats_of(error_.slice(piece.at, {piece.numel}))});
  }
  if (mesh_.world().rank() != 0) return tensors;
  const std::int64_t rounds = num_steps_ / kExact;
  for (const LowRankMatrix& m : matrices()) {
    if (!has_qs_) break;
    tensors.push_back(
        {.name = "powersgd.q", .parameter = name_of(m), .values = floats_of(q_of(m, qs_))});
  }
  tensors.push_back(
      {.name = "powersgd.step",
       .parameter = name_,
       .values = {static_cast<float>(num_steps_ % kExact), static_cast<float>(rounds)}});
  return tensors;
}

void PowerSgd::load(std::span<const HookTensor> of_all_ranks) {
  const HookTensor* const steps = find(of_all_ranks, "powersgd.step", name_);
  require(steps != nullptr && steps->values.size() == 2,
          "[powersgd] expected the steps of a unit, got none ({})", name_);
  for (const float x : steps->values) {
    require(x >= 0 && x <= kExact, "[powersgd] expected a number of steps, got {} ({})", x, name_);
  }
  // Nothing is taken over before all of it fits.
  std::vector<std::pair<Tensor, std::span<const float>>> qs;
  for (const LowRankMatrix& m : matrices()) {
    const HookTensor* const q = find(of_all_ranks, "powersgd.q", name_of(m));
    if (q == nullptr) continue;  // saved before it was drawn
    const Tensor own = q_of(m, qs_);
    require(std::ssize(q->values) == own.numel(),
            "[powersgd] expected a Q of {} x {}, got {} elements: the rank was another ({})",
            m.cols, m.rank, q->values.size(), name_of(m));
    qs.emplace_back(own, q->values);
  }
  require(qs.empty() || std::ssize(qs) == num_matrices(),
          "[powersgd] expected a Q of every matrix of a unit, got {} of {} ({})", qs.size(),
          num_matrices(), name_);
  std::vector<std::pair<Tensor, std::vector<float>>> errors;
  for (const LowRankPiece& piece : layout_.pieces()) {
    if (!piece.matrix || !error_.defined()) continue;
    errors.emplace_back(error_.slice(piece.at, {piece.numel}),
                        cut_error(of_all_ranks, parameters_[piece.parameter]->name, part_,
                                  num_parts_, piece.parameter_begin, piece.numel));
  }
  for (const auto& [own, values] : errors) engine::copy_from_floats(own, values);
  for (const auto& [own, values] : qs) engine::copy_from_floats(own, values);
  has_qs_ = !qs.empty();
  num_steps_ = static_cast<std::int64_t>(steps->values[0]) +
               kExact * static_cast<std::int64_t>(steps->values[1]);
}

}  // namespace tessera::shard
