#include "shard/hooks/hook.h"

#include <algorithm>

#include "engine/error.h"
#include "shard/fsdp.h"

namespace tessera::shard {

using engine::require;

namespace {

class StateInMemory final : public HookState {
 public:
  explicit StateInMemory(std::span<const HookTensor> tensors) : tensors_(tensors) {
    infos_.assign(tensors.begin(), tensors.end());
  }
  std::span<const HookTensorInfo> tensors() const override { return infos_; }
  void read(std::size_t index, std::int64_t first, std::span<float> out) const override {
    const std::span<const float> values = tensors_[index].values;
    std::ranges::copy(values.subspan(static_cast<std::size_t>(first), out.size()), out.begin());
  }

 private:
  std::span<const HookTensor> tensors_;
  std::vector<HookTensorInfo> infos_;
};

HookReducer* hook_of(const Unit& unit) { return dynamic_cast<HookReducer*>(unit.reducer()); }

}  // namespace

CutError::CutError(const HookState& state, const std::string& parameter, int part, int num_parts)
    : state_(state),
      parameter_(parameter),
      part_(static_cast<std::size_t>(part)),
      num_parts_(static_cast<std::size_t>(num_parts)) {
  const std::span<const HookTensorInfo> all = state.tensors();
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].name != "powersgd.error" || all[i].parameter != parameter) continue;
    if (tensors_.empty()) tensors_.resize(static_cast<std::size_t>(std::max(all[i].num_parts, 1)));
    require(all[i].num_parts == std::ssize(tensors_) && all[i].part >= 0 &&
                all[i].part < all[i].num_parts,
            "[powersgd] expected parts of {}, got part {} of {} ({})", tensors_.size(), all[i].part,
            all[i].num_parts, parameter);
    tensors_[static_cast<std::size_t>(all[i].part)].push_back(i);
  }
  require(
      !tensors_.empty(),
      "[powersgd] expected the error of a parameter that is compressed, got none, so it was not: "
      "the hook, its rank or min_compression_rate was another ({})",
      parameter);
  for (auto& of_part : tensors_) {
    std::ranges::sort(of_part, {}, [&](std::size_t i) { return all[i].begin; });
  }
}

void CutError::check(std::int64_t begin, std::int64_t numel) const {
  for (std::size_t old = 0; old < tensors_.size(); ++old) {
    std::int64_t next = begin;  // first element that was not seen
    for (const std::size_t i : tensors_[old]) {
      const HookTensorInfo& t = state_.tensors()[i];
      if (t.numel == 0 || t.begin + t.numel <= begin || t.begin >= begin + numel) continue;
      require(t.begin >= next || next == begin,
              "[powersgd] expected each element of an error once, got {} twice ({})",
              std::max(t.begin, begin), parameter_);
      if (t.begin > next) break;
      next = t.begin + t.numel;
    }
    require(next >= begin + numel,
            "[powersgd] expected all elements of part {} of {}, got none of {} ({})", old,
            tensors_.size(), next, parameter_);
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

std::vector<HookTensor> save_hooks(const Fsdp& fsdp) {
  fsdp.synchronize();
  fsdp.settle_step();
  std::vector<HookTensor> tensors;
  for (const auto& unit : fsdp.units()) {
    const HookReducer* const hook = hook_of(*unit);
    if (hook == nullptr) continue;
    for (HookTensor& t : hook->state()) tensors.push_back(std::move(t));
  }
  return tensors;
}

bool have_hooks_state(const Fsdp& fsdp) {
  return std::ranges::any_of(fsdp.units(), [](const auto& unit) {
    const HookReducer* const hook = hook_of(*unit);
    return hook != nullptr && hook->has_state();
  });
}

void load_hooks(const Fsdp& fsdp, const HookState& of_all_ranks) {
  fsdp.synchronize();
  fsdp.settle_step();
  for (const auto& unit : fsdp.units()) {
    if (HookReducer* const hook = hook_of(*unit)) hook->load(of_all_ranks);
  }
}

void load_hooks(const Fsdp& fsdp, std::span<const HookTensor> of_all_ranks) {
  load_hooks(fsdp, StateInMemory(of_all_ranks));
}

}  // namespace tessera::shard
