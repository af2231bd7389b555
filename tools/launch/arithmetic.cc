#include "tools/launch/arithmetic.h"

#include <fmt/format.h>
#include <gnu/libc-version.h>

#include <cstddef>
#include <span>
#include <sstream>
#include <string_view>

#include "comm/nccl.h"
#include "engine/cuda.h"
#include "engine/gemm/gemm.h"
#include "engine/io/json.h"
#include "engine/io/xxh3.h"
#include "engine/isa.h"
#include "tools/machine/cpu_model.h"

namespace tessera::tools {

std::string gpu_text(const Ranks& ranks) {
  if constexpr (engine::kCudaBuilt) {
    if (ranks.num_gpus > 0) {
      return engine::gemm_cuda_library(engine::Stream::cuda("arithmetic", ranks.first_gpu));
    }
  }
  return "";
}

std::string arithmetic_text(const Ranks& ranks, const std::string& gpu,
                            const engine::GemmAlgorithms* algorithms) {
  std::string text;
  const auto add = [&text](std::string_view name, std::string_view value) {
    text += fmt::format("{} = {}\n", name, engine::json_literal(value));
  };
  add("device", ranks.num_gpus == 0 ? "cpu" : "cuda");
  add("libc", gnu_get_libc_version());  // logarithms of losses, cosines of learning rates
  if (ranks.num_gpus == 0) {
    add("cpu", cpu_model());
    add("cpu.isa", name_of(engine::isa()));
    add("cpu.gemm", engine::gemm_library());
    text += fmt::format("cpu.threads_per_rank = {}\n", engine::threads_per_product());
    return text;
  }
  if constexpr (engine::kCudaBuilt) {
    add("gpu", gpu);
    if (algorithms != nullptr) {
      const std::string all = algorithms->text();
      add("cuda.gemm_algorithms",
          fmt::format("{:016x}", engine::xxh3(std::as_bytes(std::span(all)))));
    }
    if (ranks.nccl) add("nccl", comm::nccl_version());
  }
  return text;
}

std::map<std::string, std::string> arithmetic_values(const std::string& text) {
  std::map<std::string, std::string> values;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t equals = line.find(" = ");
    if (equals != std::string::npos) values[line.substr(0, equals)] = line.substr(equals + 3);
  }
  return values;
}

}  // namespace tessera::tools
