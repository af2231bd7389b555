#include "engine/gemm/choice.h"

#include <charconv>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "engine/error.h"
#include "engine/gemm/amx_tiles.h"

namespace tessera::engine {
namespace {

constexpr int kMaxThreads = 1024;

int wished_threads() {
  const char* const variable = std::getenv("TESSERA_CPU_THREADS");
  const std::string_view text = variable == nullptr || *variable == 0 ? "1" : variable;
  int count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  require(error == std::errc() && end == text.data() + text.size() && count >= 1 &&
              count <= kMaxThreads,
          "[gemm] expected a number of threads from 1 to {}, got '{}' "
          "(TESSERA_CPU_THREADS)",
          kMaxThreads, text);
  return count;
}

GemmChoice choose() {
  const char* const variable = std::getenv("TESSERA_CPU_GEMM");
  const std::string_view name = variable == nullptr ? "" : variable;
  const bool insists = name == "onednn", refuses = name == "eigen";
  const SplitF32 split = name == "split"            ? SplitF32::kAmx
                         : name == "split-portable" ? SplitF32::kPortable
                                                    : SplitF32::kNo;
  require(insists || refuses || split != SplitF32::kNo || name.empty() || name == "auto",
          "[gemm] expected auto, onednn, eigen or split, got '{}' (TESSERA_CPU_GEMM)", name);
  const int num_threads = wished_threads();
  if (split == SplitF32::kAmx) request_amx();
  require(num_threads == 1 || split == SplitF32::kNo,
          "[gemm] expected 1 thread for products that are split, got {} (TESSERA_CPU_THREADS)",
          num_threads);
  auto library = refuses ? nullptr : OneDnn::load(num_threads);
  require(!insists || library != nullptr,
          "[gemm] expected libdnnl.so.2, got none that is built for OpenMP: `apt-get "
          "install libdnnl2` brings it (TESSERA_CPU_GEMM)");
  require(num_threads == 1 || library != nullptr,
          "[gemm] expected oneDNN for products of {} threads, got Eigen "
          "(TESSERA_CPU_THREADS)",
          num_threads);
  return {std::move(library), num_threads, insists, !insists && !refuses, split};
}

}  // namespace

const GemmChoice& gemm_choice() {
  static const GemmChoice the_choice = choose();
  return the_choice;
}

}  // namespace tessera::engine
