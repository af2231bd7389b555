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
