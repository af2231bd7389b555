#include "shard/hook.h"

#include <algorithm>

#include "engine/error.h"
#include "shard/fsdp.h"

namespace tessera::shard {

using engine::require;

namespace {

HookReducer* hook_of(const Unit& unit) { return dynamic_cast<HookReducer*>(unit.reducer()); }

}  // namespace

std::vector<float> cut_error(std::span<const HookTensor> of_all_ranks, const std::string& parameter,
                             int part, int num_parts, std::int64_t begin, std::int64_t numel) {
  const auto size = static_cast<std::size_t>(numel);
  int num_old = 0;
  for (const HookTensor& t : of_all_ranks) {
    if (t.name == "powersgd.error" && t.parameter == parameter) num_old = t.num_parts;
  }
  require(num_old > 0, "[powersgd] expected the error of a parameter, got none ({})", parameter);
  // Of each new part the sum of old ones; [part][element].
  std::vector<std::vector<double>> sums(static_cast<std::size_t>(num_parts));
  for (auto& sum : sums) sum.resize(size);
  std::vector<std::vector<std::uint8_t>> seen(static_cast<std::size_t>(num_old));
  for (auto& there : seen) there.resize(size);
  for (const HookTensor& t : of_all_ranks) {
    if (t.name != "powersgd.error" || t.parameter != parameter) continue;
    require(t.num_parts == num_old && t.part >= 0 && t.part < num_old,
            "[powersgd] expected parts of {}, got part {} of {} ({})", num_old, t.part, t.num_parts,
            parameter);
    const std::int64_t first = std::max(begin, t.begin);
    const std::int64_t end = std::min(begin + numel, t.begin + std::ssize(t.values));
    auto& sum = sums[static_cast<std::size_t>(t.part % num_parts)];
    for (std::int64_t i = first; i < end; ++i) {
      const auto at = static_cast<std::size_t>(i - begin);
      std::uint8_t& there = seen[static_cast<std::size_t>(t.part)][at];
      require(there == 0, "[powersgd] expected each element of an error once, got {} twice ({})", i,
              parameter);
      there = 1;
      sum[at] += t.values[static_cast<std::size_t>(i - t.begin)];
    }
  }
  for (int old = 0; old < num_old; ++old) {
    const auto& there = seen[static_cast<std::size_t>(old)];
    const auto missing = std::ranges::find(there, 0) - there.begin();
    require(missing == std::ssize(there),
            "[powersgd] expected all elements of part {} of {}, got none of {} ({})", old, num_old,
            begin + missing, parameter);
  }
  std::vector<float> values(size);
  for (std::size_t i = 0; i < size; ++i) {
    double carried = 0;
    for (int p = 0; p <= part; ++p) {
      const double exact = sums[static_cast<std::size_t>(p)][i] + carried;
      values[i] = static_cast<float>(exact);
      carried = exact - values[i];
    }
  }
  return values;
}

std::vector<HookTensor> save_hooks(const Fsdp& fsdp) {
  fsdp.synchronize();
  std::vector<HookTensor> tensors;
  for (const auto& unit : fsdp.units()) {
    const HookReducer* const hook = hook_of(*unit);
    if (hook == nullptr) continue;
    for (HookTensor& t : hook->state()) tensors.push_back(std::move(t));
  }
  return tensors;
}

void load_hooks(const Fsdp& fsdp, std::span<const HookTensor> of_all_ranks) {
  fsdp.synchronize();
  for (const auto& unit : fsdp.units()) {
    if (HookReducer* const hook = hook_of(*unit)) hook->load(of_all_ranks);
  }
}

}  // namespace tessera::shard
