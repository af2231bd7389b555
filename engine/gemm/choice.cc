#include "engine/gemm/choice.h"

#include <utility>

#include "engine/error.h"
#include "engine/gemm/amx_tiles.h"

namespace tessera::engine {
namespace {

constexpr int kMaxThreads = 1024;

GemmChoice make(const CpuChoice& choice) {
  const bool insists = choice.gemm == CpuGemm::kOneDnn, refuses = choice.gemm == CpuGemm::kEigen;
  const bool splits = choice.gemm == CpuGemm::kSplit || choice.gemm == CpuGemm::kSplitPortable;
  const int num_threads = choice.threads_per_product.value_or(1);
  const std::string_view of_threads = choice.names.threads_per_product;
  require(num_threads >= 1 && num_threads <= kMaxThreads,
          "[gemm] expected a number of threads from 1 to {}, got {} ({})", kMaxThreads, num_threads,
          of_threads);
  if (choice.gemm == CpuGemm::kSplit) request_amx(choice.names.gemm);
  require(num_threads == 1 || !splits,
          "[gemm] expected 1 thread for products that are split, got {} ({})", num_threads,
          of_threads);
  auto library = refuses ? nullptr : OneDnn::load(num_threads);
  require(!insists || library != nullptr,
          "[gemm] expected libdnnl.so.2, got none that is built for OpenMP: `apt-get "
          "install libdnnl2` brings it ({})",
          choice.names.gemm);
  require(num_threads == 1 || library != nullptr,
          "[gemm] expected oneDNN for products of {} threads, got Eigen ({})", num_threads,
          of_threads);
  return {choice.gemm, std::move(library), num_threads, insists, !insists && !refuses};
}

}  // namespace

const GemmChoice& decide_gemm(const CpuChoice& choice) {
  static const GemmChoice the_choice = make(choice);
  return the_choice;
}

const GemmChoice& gemm_choice() {
  static const GemmChoice& the_choice = decide_gemm({});
  return the_choice;
}

}  // namespace tessera::engine
