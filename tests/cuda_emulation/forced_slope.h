// Choices of algorithms in which time has no say: the slope of GELU is part of its product.
#pragma once

#include <cublasLt.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/gemm/gemm_algorithms.h"
#include "engine/stream.h"

namespace tessera::cuda_emulation {

/// What the emulated cublasLt stores for algorithm `id`; 0: what stands for "apart".
inline engine::GemmAlgorithms::Algorithm algorithm_of(std::uint32_t id) {
  engine::GemmAlgorithms::Algorithm words{};
  if (id > 0) words[0] = static_cast<std::uint32_t>(cublasLtGetVersion()), words[2] = id;
  return words;
}

/// Entries for the products of `gemms` with a slope, all of them algorithm `id`, and for no others.
inline std::shared_ptr<engine::GemmAlgorithms> forced_slopes(
    const std::vector<engine::DeviceProduct>& gemms, std::uint32_t id) {
  engine::GemmAlgorithms timed;  // for its keys
  engine::tune_gemms(engine::Stream::cuda("tuning", 0), gemms, timed);
  auto forced = std::make_shared<engine::GemmAlgorithms>();
  const std::string text = timed.text();
  for (std::string_view rest = text; !rest.empty();) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(line.size() + 1);
    const std::string key(line.substr(0, line.find('\t')));
    if (key.find(" | gelu slope") != std::string::npos) forced->insert(key, algorithm_of(id));
  }
  return forced;
}

}  // namespace tessera::cuda_emulation
