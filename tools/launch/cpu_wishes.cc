#include "tools/launch/cpu_wishes.h"

#include <array>
#include <optional>

#include "engine/error.h"

namespace tessera::tools {
namespace {

using engine::CpuGemm;
using engine::Isa;

constexpr std::array kIsas = {Isa::kV2, Isa::kV3, Isa::kV4, Isa::kV4Bf16, Isa::kV4Amx};
constexpr std::array kGemms = {CpuGemm::kOneDnn, CpuGemm::kEigen, CpuGemm::kSplit,
                               CpuGemm::kSplitPortable};

template <class Choices>
auto one_of(const Choices& choices, const CpuWish& wish, std::string_view where,
            std::string_view expected) -> std::optional<typename Choices::value_type> {
  if (!wish.asks()) return std::nullopt;
  for (const auto choice : choices) {
    if (wish.value == name_of(choice)) return choice;
  }
  engine::fail("[{}] expected {}, got '{}' ({})", where, expected, wish.value, wish.name);
}

// Of which the engine says how many there may be.
std::optional<int> threads_of(const CpuWish& wish) {
  if (!wish.asks()) return std::nullopt;
  const int count = count_of(wish.value);
  engine::require(count > 0, "[gemm] expected a number of threads, got '{}' ({})", wish.value,
                  wish.name);
  return count;
}

}  // namespace

CpuWishes CpuWishes::of(const Environment& environment) {
  const auto wish = [&](std::string_view variable) -> CpuWish {
    const auto found = environment.find(std::string(variable));
    return {found == environment.end() ? "" : found->second, variable};
  };
  return {.isa = wish("TESSERA_CPU_ISA"),
          .gemm = wish("TESSERA_CPU_GEMM"),
          .threads = wish("TESSERA_CPU_THREADS")};
}

engine::CpuChoice CpuWishes::choice() const {
  return {.isa = one_of(kIsas, isa, "cpu", "auto, v2, v3, v4, v4+bf16 or v4+amx"),
          .gemm = one_of(kGemms, gemm, "gemm", "auto, onednn, eigen or split"),
          .threads_per_product = threads_of(threads),
          .names = {.isa = isa.name, .gemm = gemm.name, .threads_per_product = threads.name}};
}

void choose_cpu_by_environment() { engine::choose_cpu(CpuWishes::of(environment()).choice()); }

}  // namespace tessera::tools
