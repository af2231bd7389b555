#include "tools/launch/cpu.h"

#include <fmt/format.h>
#include <sched.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "engine/error.h"
#include "engine/gemm/gemm.h"
#include "engine/isa.h"
#include "tools/machine/limits.h"

namespace tessera::tools {
namespace {

// An option, as the engine takes it.
struct Choice {
  std::string_view option;
  const char* variable;
  std::string value;  // auto: what the environment says stays
};

void check_chosen(const CpuConfig& config) {
  const auto check = [](std::string_view flag, bool holds) {
    engine::require(holds, "[cpu] expected to choose before anything is computed ({})", flag);
  };
  check("cpu.isa", config.isa == "auto" || name_of(engine::isa()) == config.isa);
  const std::string library = engine::gemm_library();
  check("cpu.gemm",
        config.gemm == "auto" || (engine::splits_f32() == (config.gemm == "split") &&
                                  (config.gemm == "split" ||
                                   library.starts_with("oneDNN") == (config.gemm == "onednn"))));
  check("cpu.threads_per_rank", engine::threads_per_product() == config.threads_per_rank);
}

}  // namespace

void choose_cpu(const CpuConfig& config) {
  const Choice choices[] = {
      {"cpu.isa", "TESSERA_CPU_ISA", config.isa},
      {"cpu.gemm", "TESSERA_CPU_GEMM", config.gemm},
      {"cpu.threads_per_rank", "TESSERA_CPU_THREADS", std::to_string(config.threads_per_rank)}};
  for (const Choice& c : choices) {
    if (c.value != "auto") setenv(c.variable, c.value.c_str(), 1);
  }
  try {
    check_chosen(config);
  } catch (const engine::InvalidArgument& e) {  // of a variable, which nobody may have set
    std::string text = e.what();
    for (const Choice& c : choices) {
      const std::size_t at = text.find(fmt::format("({})", c.variable));
      if (c.value == "auto" || at == std::string::npos) continue;
      text.replace(at + 1, std::string_view(c.variable).size(), c.option);
    }
    engine::fail("{}", text);
  }
}

void check_pins(const CpuConfig& config, int num_ranks, const MachineLimits& limits) {
  if (!config.pin) return;
  const int count = limits.usable_cores();
  engine::require(num_ranks * config.threads_per_rank <= count,
                  "[cpu] expected a core for each thread of {} rank{} with {} thread{}, got {} "
                  "core{}{} (cpu.pin)",
                  num_ranks, num_ranks == 1 ? "" : "s", config.threads_per_rank,
                  config.threads_per_rank == 1 ? "" : "s", count, count == 1 ? "" : "s",
                  count < limits.num_allowed
                      ? fmt::format(", as a cgroup allows the time of {:.2f}", *limits.cpu_quota)
                      : "");
}

void pin_rank(const CpuConfig& config, int rank) {
  if (!config.pin) return;
  const std::vector<std::size_t> all = allowed_cores();
  const auto each = static_cast<std::size_t>(config.threads_per_rank);
  engine::require<engine::DeviceError>(
      all.size() / each > static_cast<std::size_t>(rank),
      "[cpu] expected the system to have cores for rank {}, {} each, got {} (cpu.pin)", rank, each,
      all.size());
  std::vector<cpu_set_t> own(all.back() / CPU_SETSIZE + 1);
  const std::size_t nbytes = own.size() * sizeof(cpu_set_t);
  for (std::size_t i = 0; i < each; ++i) {
    CPU_SET_S(all[static_cast<std::size_t>(rank) * each + i], nbytes, own.data());
  }
  engine::require<engine::DeviceError>(sched_setaffinity(0, nbytes, own.data()) == 0,
                                       "[cpu] expected to keep rank {} to its cores, got {}", rank,
                                       std::strerror(errno));
}

std::string cpu_text() {
  const int num_threads = engine::threads_per_product();
  return fmt::format("{}, {}{}", name_of(engine::isa()), engine::gemm_library(),
                     num_threads == 1 ? "" : fmt::format(" with {} threads", num_threads));
}

}  // namespace tessera::tools
