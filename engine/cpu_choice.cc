#include "engine/cpu_choice.h"

#include <string>

#include "engine/error.h"
#include "engine/gemm/choice.h"

namespace tessera::engine {
namespace {

void check(std::string_view asked, std::string_view used, std::string_view name) {
  require(asked == used,
          "[cpu] expected to choose before anything is computed, got {} while {} is in use ({})",
          asked, used, name);
}

}  // namespace

std::string_view name_of(CpuGemm gemm) {
  switch (gemm) {
    case CpuGemm::kOneDnn:
      return "onednn";
    case CpuGemm::kEigen:
      return "eigen";
    case CpuGemm::kSplit:
      return "split";
    case CpuGemm::kSplitPortable:
      return "split-portable";
  }
  return "";
}

void choose_cpu(const CpuChoice& choice) {
  if (choice.isa) {
    const Isa best = best_isa();
    require(*choice.isa <= best, "[cpu] expected at most {}, which this CPU has, got {} ({})",
            name_of(best), name_of(*choice.isa), choice.names.isa);
    check(name_of(*choice.isa), name_of(internal::decide_isa(*choice.isa)), choice.names.isa);
  }
  if (!choice.gemm && !choice.threads_per_product) return;
  const GemmChoice& used = decide_gemm(choice);
  if (choice.gemm) {
    check(name_of(*choice.gemm), used.asked ? name_of(*used.asked) : "auto", choice.names.gemm);
  }
  if (choice.threads_per_product) {
    check(std::to_string(*choice.threads_per_product), std::to_string(used.num_threads),
          choice.names.threads_per_product);
  }
}

}  // namespace tessera::engine
