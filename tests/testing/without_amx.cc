// For tests of code that a CPU with AMX leaves aside: linked in, it has such a CPU do as one
// without would, unless the environment says what to take.
#include "engine/cpu_choice.h"
#include "engine/isa.h"
#include "tools/launch/cpu_wishes.h"
#include "tools/machine/environment.h"

namespace tessera::testing {
namespace {

// Before anything computes.
[[maybe_unused]] const bool kIsChosen = [] {
  const bool is_free = !tools::CpuWishes::of(tools::environment()).choice().isa;
  if (!is_free || engine::best_isa() < engine::Isa::kV4Amx) return false;
  engine::choose_cpu({.isa = engine::Isa::kV4Bf16});
  return true;
}();

}  // namespace
}  // namespace tessera::testing
