#include "tools/doctor/machine_checks.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <optional>
#include <string_view>

#include "engine/cpu_choice.h"
#include "engine/error.h"
#include "engine/gemm/gemm.h"
#include "engine/isa.h"
#include "tools/launch/cpu_wishes.h"
#include "tools/machine/cpu_model.h"
#include "tools/report/advice.h"
#include "tools/report/step_text.h"

namespace tessera::tools {
namespace {

// "... (TESSERA_CPU_GEMM)" names who asked for what there is not.
std::string fix_of(const std::string& error) {
  constexpr std::string_view kBegin = "(TESSERA_";
  const std::size_t begin = error.rfind(kBegin), end = error.find(')', begin);
  if (begin == std::string::npos || end == std::string::npos) {
    return "sudo apt-get install libdnnl2";
  }
  const std::string unset = "unset " + error.substr(begin + 1, end - begin - 1);
  const bool is_missing = error.find("libdnnl2") != std::string::npos;
  return is_missing ? unset + ", or sudo apt-get install libdnnl2" : unset;
}

std::string bytes(std::int64_t nbytes) { return nbytes_text(static_cast<double>(nbytes)); }

}  // namespace

Check check_cpu(const Environment& environment, const std::string& root) {
  Check check{.name = "cpu", .found = cpu_model(root)};
  check.facts.add("model", check.found);
  const CpuWish wish = CpuWishes::of(environment).isa;
  try {
    engine::choose_cpu(CpuWishes{.isa = wish}.choice());
    const std::string isa(name_of(engine::isa()));
    check.found += ", instruction set " + isa;
    check.facts.add("isa", isa);
  } catch (const engine::InvalidArgument& error) {
    check.verdict = Verdict::kFail;
    check.found += fmt::format("; {}", error.what());
    check.fix = "unset TESSERA_CPU_ISA";
    return check;
  }
  if (wish.asks()) {
    check.verdict = Verdict::kWarn;
    check.found += ", as TESSERA_CPU_ISA says";
    check.fix = "unset TESSERA_CPU_ISA, for the best that this processor has";
  } else if (engine::isa() == engine::Isa::kV2) {
    check.verdict = Verdict::kWarn;
    check.fix = "none on this machine; one with AVX2 or AVX-512 is several times as fast";
  }
  return check;
}

Check check_libraries(const Environment& environment) {
  Check check{.name = "products"};
  CpuWishes wishes = CpuWishes::of(environment);
  wishes.isa = {};
  try {
    engine::choose_cpu(wishes.choice());
    const std::string library = engine::gemm_library();
    const bool bf16 = engine::multiplies_bf16();
    check.found = fmt::format("{} multiplies matrices, {}", library,
                              bf16 ? "those of bf16 in bf16" : "those of bf16 widened to f32");
    check.facts.add("library", library).add("multiplies_bf16", bf16);
    if (!library.starts_with("oneDNN")) {
      check.verdict = Verdict::kWarn;
      check.fix = wishes.gemm.asks()
                      ? "unset TESSERA_CPU_GEMM"
                      : "sudo apt-get install libdnnl2; it is faster, and multiplies bf16 as such";
    }
  } catch (const engine::InvalidArgument& error) {
    check.verdict = Verdict::kFail;
    check.found = error.what();
    check.fix = fix_of(check.found);
  }
  return check;
}

Check check_cores(const MachineLimits& limits, int num_ranks) {
  Check check{.name = "cores"};
  const int usable = limits.usable_cores();
  check.found = fmt::format("{} usable", usable);
  if (limits.num_allowed < limits.num_cores) {
    check.found += fmt::format("; affinity allows {} of {}", limits.num_allowed, limits.num_cores);
  }
  check.facts.add("machine", limits.num_cores).add("allowed", limits.num_allowed);
  check.facts.add("usable", usable);
  if (limits.cpu_quota) {
    check.found += fmt::format("; a cgroup allows the time of {:.2f}", *limits.cpu_quota);
    check.facts.add("quota", *limits.cpu_quota);
  }
  if (usable < num_ranks) {
    TrainConfig config;
    check.verdict = Verdict::kWarn;
    check.found += fmt::format("; {} ranks, the default, would share them", num_ranks);
    check.fix = "try " + fewer_ranks(config, num_ranks, usable);
    if (usable < limits.num_cores) check.fix += ", or let this process use more cores";
  }
  return check;
}

Check check_memory(const MachineLimits& limits) {
  constexpr std::int64_t kLittle = std::int64_t{512} << 20;  // the first example takes less
  Check check{.name = "memory"};
  const std::int64_t usable = limits.usable_nbytes();
  check.found = fmt::format("{} free of {}", bytes(usable), bytes(limits.memory_nbytes));
  check.facts.add("machine_bytes", limits.memory_nbytes).add("usable_bytes", usable);
  if (limits.cgroup_limit_nbytes) {
    check.found +=
        fmt::format("; a cgroup allows {}, and {} of them are used",
                    bytes(*limits.cgroup_limit_nbytes), bytes(limits.cgroup_used_nbytes));
    check.facts.add("cgroup_limit_bytes", *limits.cgroup_limit_nbytes);
  }
  if (limits.address_limit_nbytes) {
    check.found += fmt::format("; ulimit -v allows {}", bytes(*limits.address_limit_nbytes));
    check.facts.add("address_limit_bytes", *limits.address_limit_nbytes);
  }
  if (usable < kLittle) {
    check.verdict = Verdict::kWarn;
    check.fix =
        "end other programs, or raise the limit; trainers refuse what does not fit, and "
        "--memory_budget=SIZE finds out what does";
  }
  return check;
}

Check check_huge_pages(const std::string& root) {
  Check check{.name = "huge pages"};
  const auto line = first_line(root + "/sys/kernel/mm/transparent_hugepage/enabled");
  const std::size_t begin = line ? line->find('[') : std::string::npos;
  const std::size_t end = line ? line->find(']') : std::string::npos;
  const bool is_known = begin != std::string::npos && end != std::string::npos && begin < end;
  const std::string mode = is_known ? line->substr(begin + 1, end - begin - 1) : "not told";
  check.found = "transparent huge pages: " + mode;
  check.facts.add("mode", mode);
  if (mode == "never") {
    check.verdict = Verdict::kWarn;
    check.fix =
        "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled; large buffers ask "
        "for huge pages, and are slower without";
  }
  return check;
}

std::int64_t offload_nbytes(std::int64_t num_parameters) {
  constexpr std::int64_t kMaster = 4, kGradient = 4, kMoments = 8;
  return num_parameters * (kMaster + kGradient + kMoments);
}

Check check_locked_memory(std::int64_t limit_nbytes, const std::string& model,
                          std::int64_t num_parameters, bool has_gpu) {
  Check check{.name = "locked memory"};
  const std::int64_t need = offload_nbytes(num_parameters);
  check.found = fmt::format("limit {}; offloading all of {} takes {} (16 B x {:.1f}M)",
                            limit_nbytes < 0 ? "none" : bytes(limit_nbytes), model, bytes(need),
                            static_cast<double>(num_parameters) * 1e-6);
  check.facts.add("limit_bytes", limit_nbytes).add("offload_bytes", need);
  if (!has_gpu) {
    check.found += "; on the CPU offload locks nothing";
  } else if (limit_nbytes >= 0 && limit_nbytes < need) {
    check.verdict = Verdict::kWarn;
    check.fix =
        "ulimit -l unlimited (for good: memlock in /etc/security/limits.conf); NCCL over "
        "InfiniBand, and some drivers, count page-locked memory against it";
  }
  return check;
}

Check check_open_files(std::int64_t limit) {
  constexpr std::int64_t kFew = 1024;
  Check check{.name = "open files"};
  check.found = limit < 0 ? "no limit" : fmt::format("limit {}", limit);
  check.facts.add("limit", limit);
  if (limit >= 0 && limit < kFew) {
    check.verdict = Verdict::kWarn;
    check.fix = "ulimit -n 1024; every rank over NCCL opens sockets and shared memory";
  }
  return check;
}

std::int64_t soft_limit(int resource) {
  rlimit limit{};
  if (::getrlimit(static_cast<__rlimit_resource>(resource), &limit) != 0) return -1;
  return limit.rlim_cur == RLIM_INFINITY ? -1 : static_cast<std::int64_t>(limit.rlim_cur);
}

}  // namespace tessera::tools
