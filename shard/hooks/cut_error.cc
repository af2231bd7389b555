#include "shard/hooks/cut_error.h"

#include <algorithm>
#include <utility>

#include "engine/error.h"

namespace tessera::shard {

using engine::require;

namespace {

// HOOK of HOOK.TENSOR.
std::string_view hook_of(std::string_view name) { return name.substr(0, name.find('.')); }

}  // namespace

CutError::CutError(const HookState& state, std::string name, std::string parameter, int part,
                   int num_parts)
    : state_(state),
      name_(std::move(name)),
      parameter_(std::move(parameter)),
      part_(static_cast<std::size_t>(part)),
      num_parts_(static_cast<std::size_t>(num_parts)) {
  const std::span<const HookTensorInfo> all = state.tensors();
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].name != name_ || all[i].parameter != parameter_) continue;
    if (tensors_.empty()) tensors_.resize(static_cast<std::size_t>(std::max(all[i].num_parts, 1)));
    require(all[i].num_parts == std::ssize(tensors_) && all[i].part >= 0 &&
                all[i].part < all[i].num_parts,
            "[{}] expected {} in {} parts, got part {} of {} ({})", hook(), name_, tensors_.size(),
            all[i].part, all[i].num_parts, parameter_);
    tensors_[static_cast<std::size_t>(all[i].part)].push_back(i);
  }
  require(!tensors_.empty(),
          "[{}] expected {} as it was saved, got none: the hook that saved, or what it was made "
          "with, was another ({})",
          hook(), name_, parameter_);
  for (auto& of_part : tensors_) {
    std::ranges::sort(of_part, {}, [&](std::size_t i) { return all[i].begin; });
  }
}

std::string_view CutError::hook() const { return hook_of(name_); }

void CutError::check(std::int64_t begin, std::int64_t numel) const {
  for (std::size_t old = 0; old < tensors_.size(); ++old) {
    std::int64_t next = begin;  // first element that was not seen
    for (const std::size_t i : tensors_[old]) {
      const HookTensorInfo& t = state_.tensors()[i];
      if (t.numel == 0 || t.begin + t.numel <= begin || t.begin >= begin + numel) continue;
      require(t.begin >= next || next == begin,
              "[{}] expected each element of {} once, got {} twice ({})", hook(), name_,
              std::max(t.begin, begin), parameter_);
      if (t.begin > next) break;
      next = t.begin + t.numel;
    }
    require(next >= begin + numel,
            "[{}] expected all elements of part {} of {} of {}, got none of {} ({})", hook(), old,
            tensors_.size(), name_, next, parameter_);
  }
}

void CutError::add(std::span<double> sum, std::size_t old, std::int64_t begin) const {
  std::vector<float> values;
  for (const std::size_t i : tensors_[old]) {
    const HookTensorInfo& t = state_.tensors()[i];
    const std::int64_t first = std::max(begin, t.begin);
    const std::int64_t end = std::min(begin + std::ssize(sum), t.begin + t.numel);
    if (first >= end) continue;
    values.resize(static_cast<std::size_t>(end - first));
    state_.read(i, first - t.begin, values);
    auto* to = sum.data() + (first - begin);
    for (const float x : values) *to++ += x;
  }
}

void CutError::read(std::int64_t begin, std::span<float> out) const {
  // Nothing is left by rounding where a new part is of one old part at most.
  const std::size_t first_part = tensors_.size() <= num_parts_ ? part_ : 0;
  std::vector<double> sum(out.size()), carried(out.size());
  for (std::size_t p = first_part; p <= part_; ++p) {
    std::ranges::fill(sum, 0.0);
    for (std::size_t old = p; old < tensors_.size(); old += num_parts_) add(sum, old, begin);
    for (std::size_t i = 0; i < out.size(); ++i) {
      const double exact = sum[i] + carried[i];
      out[i] = static_cast<float>(exact);
      carried[i] = exact - out[i];
    }
  }
}

std::size_t find_own_part(const HookState& state, const HookTensorInfo& own) {
  const std::span<const HookTensorInfo> all = state.tensors();
  const auto of_parameter = [&](const HookTensorInfo& t) {
    return t.name == own.name && t.parameter == own.parameter;
  };
  const auto any = std::ranges::find_if(all, of_parameter);
  require(any != all.end(),
          "[{}] expected {} as it was saved, got none: the hook that saved, or what it was made "
          "with, was another ({})",
          hook_of(own.name), own.name, own.parameter);
  require(any->num_parts == own.num_parts,
          "[{}] expected {} of {} ranks, as it cannot be divided, got it of {} ({})",
          hook_of(own.name), own.name, own.num_parts, any->num_parts, own.parameter);
  const auto found = std::ranges::find_if(all, [&](const HookTensorInfo& t) {
    return of_parameter(t) && t.part == own.part && t.num_parts == own.num_parts;
  });
  require(found != all.end(), "[{}] expected part {} of {} of {}, got none ({})", hook_of(own.name),
          own.part, own.num_parts, own.name, own.parameter);
  return static_cast<std::size_t>(found - all.begin());
}

}  // namespace tessera::shard
