#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "engine/copy.h"
#include "engine/elementwise.h"
#include "engine/error.h"
#include "engine/io/text.h"
#include "shard/hooks/cut_error.h"
#include "shard/hooks/powersgd_reducer.h"

namespace tessera::shard {

using engine::Parameter;
using engine::require;
using engine::Tensor;

namespace {

constexpr std::int64_t kExact = std::int64_t{1} << 24;      // integers below are exact in f32
constexpr std::int64_t kReadNumel = std::int64_t{1} << 20;  // elements in host memory at a time

std::optional<std::size_t> find(const HookState& state, std::string_view name,
                                const std::string& parameter) {
  const auto all = state.tensors();
  const auto found = std::ranges::find_if(
      all, [&](const HookTensorInfo& t) { return t.name == name && t.parameter == parameter; });
  if (found == all.end()) return std::nullopt;
  return static_cast<std::size_t>(found - all.begin());
}

// "h.0, h.1, h.2 and 9 more", those that have steps.
std::string units_of(const HookState& state) {
  constexpr int kMostShown = 6;
  std::string shown;
  int num_units = 0;
  for (const HookTensorInfo& t : state.tensors()) {
    if (t.name != "powersgd.step" || ++num_units > kMostShown) continue;
    shown += fmt::format("{}{}", shown.empty() ? "" : ", ", engine::excerpt(t.parameter));
  }
  if (num_units > kMostShown) shown += fmt::format(" and {} more", num_units - kMostShown);
  return shown;
}

HookTensor hook_tensor(HookTensorInfo info, std::vector<float> values) {
  info.numel = std::ssize(values);
  return {std::move(info), std::move(values)};
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
    tensors.push_back(hook_tensor({.name = "powersgd.error",
                                   .parameter = parameters_[piece.parameter]->name,
                                   .part = part_,
                                   .num_parts = num_parts_,
                                   .begin = piece.parameter_begin,
                                   .whole_numel = parameters_[piece.parameter]->shape.numel()},
                                  floats_of(error_.slice(piece.at, {piece.numel}))));
  }
  if (mesh_.world().rank() != 0) return tensors;
  const std::int64_t rounds = num_steps_ / kExact;
  for (const LowRankMatrix& m : matrices()) {
    if (!has_qs_) break;
    tensors.push_back(
        hook_tensor({.name = "powersgd.q", .parameter = name_of(m)}, floats_of(q_of(m, qs_))));
  }
  tensors.push_back(
      hook_tensor({.name = "powersgd.step", .parameter = name_},
                  {static_cast<float>(num_steps_ % kExact), static_cast<float>(rounds)}));
  return tensors;
}

std::optional<bool> PowerSgd::takes(const HookTensorInfo& info) const {
  const auto parameter = std::ranges::find(parameters_, info.parameter, &Parameter::name);
  const bool is_parameter = parameter != parameters_.end();
  if (info.name == "powersgd.error" && is_parameter) {
    const auto i = static_cast<std::size_t>(parameter - parameters_.begin());
    return options_.error_feedback && layout_.sent(i).rank > 0;
  }
  if (info.name == "powersgd.q" && (is_parameter || info.parameter == name_)) {
    return std::ranges::any_of(
        matrices(), [&](const LowRankMatrix& m) { return name_of(m) == info.parameter; });
  }
  return std::nullopt;
}

void PowerSgd::load(const HookState& of_all_ranks) {
  const std::optional<std::size_t> at = find(of_all_ranks, "powersgd.step", name_);
  std::array<float, 2> steps{};
  const std::string units = at ? "" : units_of(of_all_ranks);
  require(units.empty(),
          "[powersgd] expected blocks packed as they were saved, into units {}, got a unit {}: "
          "unit_min_numel or bucket_nbytes (a trainer's parallel.unit_min_numel, "
          "parallel.bucket_mb) was another",
          units, name_);
  require(at && of_all_ranks.tensors()[*at].numel == std::ssize(steps),
          "[powersgd] expected the steps of a unit, got none ({})", name_);
  of_all_ranks.read(*at, 0, steps);
  for (const float x : steps) {
    require(x >= 0 && x <= kExact, "[powersgd] expected a number of steps, got {} ({})", x, name_);
  }
  // Nothing is taken over before all of it fits.
  struct OwnQ {
    Tensor own;
    std::size_t saved;
  };
  std::vector<OwnQ> qs;
  for (const LowRankMatrix& m : matrices()) {
    const std::optional<std::size_t> q = find(of_all_ranks, "powersgd.q", name_of(m));
    if (!q) continue;  // saved before it was drawn
    const Tensor own = q_of(m, qs_);
    const std::int64_t numel = of_all_ranks.tensors()[*q].numel;
    require(numel == own.numel(),
            "[powersgd] expected a Q of {} x {}, got {} elements: the rank was another ({})",
            m.cols, m.rank, numel, name_of(m));
    qs.push_back({own, *q});
  }
  require(qs.empty() || std::ssize(qs) == num_matrices(),
          "[powersgd] expected a Q of every matrix of a unit, got {} of {} ({})", qs.size(),
          num_matrices(), name_);
  struct OwnError {
    const LowRankPiece& piece;
    CutError saved;
  };
  std::vector<OwnError> errors;
  for (const LowRankPiece& piece : layout_.pieces()) {
    if (!piece.matrix || !error_.defined()) continue;
    const std::string& parameter = parameters_[piece.parameter]->name;
    require(find(of_all_ranks, "powersgd.error", parameter).has_value(),
            "[powersgd] expected the error of a parameter that is compressed, got none, so it was "
            "not: the hook, its rank or min_compression_rate was another ({})",
            parameter);
    const CutError error(of_all_ranks, "powersgd.error", parameter, part_, num_parts_);
    error.check(piece.parameter_begin, piece.numel);
    errors.push_back({piece, error});
  }

  std::vector<float> values;
  const auto copy = [&](const Tensor& own, const auto& read) {
    for (std::int64_t first = 0; first < own.numel(); first += kReadNumel) {
      const std::int64_t n = std::min(kReadNumel, own.numel() - first);
      values.resize(static_cast<std::size_t>(n));
      read(first, std::span<float>(values));
      engine::copy_from_floats(own.slice(first, {n}), values);
    }
  };
  for (const OwnError& e : errors) {
    copy(error_.slice(e.piece.at, {e.piece.numel}), [&](std::int64_t first, std::span<float> out) {
      e.saved.read(e.piece.parameter_begin + first, out);
    });
  }
  for (const OwnQ& q : qs) {
    copy(q.own.reshape({q.own.numel()}),
         [&](std::int64_t first, std::span<float> out) { of_all_ranks.read(q.saved, first, out); });
  }
  has_qs_ = !qs.empty();
  num_steps_ = static_cast<std::int64_t>(steps[0]) + kExact * static_cast<std::int64_t>(steps[1]);
}

}  // namespace tessera::shard
