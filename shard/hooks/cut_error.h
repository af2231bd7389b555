// What each rank's hook remembers for itself, for a run of another number of ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shard/hooks/hook.h"

namespace tessera::shard {

/// Part `part` of `num_parts` of what a hook's ranks owe to a parameter, such as the errors of
/// error feedback, of which `state` holds all parts as tensors `name`, however they are cut: their
/// sum counts, so it may be divided among another number. With as many parts as before each is what
/// it was. New part j is the sum of the old parts i for which i % num_parts == j, in double; what
/// its rounding to f32 leaves is given to the next one, so the sum over the new parts is that over
/// the old ones but for one rounding. `state` must outlive it.
class CutError {
 public:
  /// `name`: as of HookTensorInfo. Throws InvalidArgument naming hook, tensor and parameter if
  /// there is none, or parts are not of one number.
  CutError(const HookState& state, std::string name, std::string parameter, int part,
           int num_parts);
  /// Throws InvalidArgument naming hook, tensor and parameter unless each of the elements [begin,
  /// begin + numel) of the whole is there in every old part, once.
  void check(std::int64_t begin, std::int64_t numel) const;
  /// out = elements from `begin` on, which were checked.
  void read(std::int64_t begin, std::span<float> out) const;

 private:
  void add(std::span<double> sum, std::size_t old, std::int64_t begin) const;
  std::string_view hook() const;  // for errors

  const HookState& state_;
  std::string name_, parameter_;
  std::size_t part_, num_parts_;
  std::vector<std::vector<std::size_t>> tensors_;  // of each old part, by their first element
};

/// For what cannot be divided, as it is of one rank's gradients alone: which of `state.tensors()`
/// is `own` (of which name, parameter, part and num_parts count). Throws InvalidArgument naming
/// hook, tensor and parameter if there is none, or it was saved by another number of ranks.
std::size_t find_own_part(const HookState& state, const HookTensorInfo& own);

}  // namespace tessera::shard
