#include "tools/doctor/gpu_checks.h"

#include <fmt/format.h>

#include <filesystem>

#include "comm/nccl.h"
#include "engine/cuda.h"
#include "engine/error.h"
#include "engine/io/text.h"
#include "tools/report/step_text.h"

namespace tessera::tools {
namespace {

// 12040: CUDA 12.4.
std::string cuda_version(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

}  // namespace

Check check_gpus(const GpuFacts* facts, bool has_driver) {
  constexpr int kOldestMajor = 8;  // what --define=cuda_archs says if nothing else
  Check check{.name = "gpus"};
  check.facts.add("build_has_cuda", facts != nullptr).add("kernel_has_driver", has_driver);
  if (facts == nullptr) {
    check.found = "built without CUDA; trainings run on the CPU";
    if (!has_driver) return check;
    check.verdict = Verdict::kWarn;
    check.found = "NVIDIA's driver found, but built without CUDA; trainings run on the CPU";
    check.fix =
        "install the CUDA Toolkit, in CUDA_HOME or /usr/local/cuda, and build again without "
        "NO_CUDA=1";
    return check;
  }
  check.facts.add("num_gpus", facts->gpus.size()).add("driver", facts->driver_version);
  check.facts.add("runtime", facts->runtime_version);
  if (facts->gpus.empty()) {
    check.found = fmt::format("no GPU found; built with CUDA {}; trainings run on the CPU",
                              cuda_version(facts->runtime_version));
    if (!has_driver) return check;
    check.verdict = Verdict::kWarn;
    check.found = "NVIDIA's driver found, but no GPU that this process may use";
    check.fix =
        "unset CUDA_VISIBLE_DEVICES, if it is set; nvidia-smi shows GPUs and driver: one that is "
        "older than CUDA's runtime shows none";
    return check;
  }
  std::vector<std::string> all;
  for (const Gpu& gpu : facts->gpus) {
    all.push_back(fmt::format("{} ({}, {}.{})", gpu.name,
                              nbytes_text(static_cast<double>(gpu.memory_nbytes)), gpu.major,
                              gpu.minor));
    if (gpu.major >= kOldestMajor || check.verdict == Verdict::kFail) continue;
    check.verdict = Verdict::kFail;
    check.fix = fmt::format(
        "build with --define=cuda_archs={}{}, or hide it (CUDA_VISIBLE_DEVICES): "
        "kernels are compiled for compute capability 8.0 and later",
        gpu.major, gpu.minor);
  }
  check.found = fmt::format("{}: {}; driver for CUDA {}, runtime {}", facts->gpus.size(),
                            engine::join(all, ", "), cuda_version(facts->driver_version),
                            cuda_version(facts->runtime_version));
  return check;
}

Check check_nccl(const std::string& version, const std::string& error, std::size_t num_gpus) {
  Check check{.name = "nccl"};
  check.facts.add("version", version);
  constexpr const char* kUse = "used with two or more GPUs";
  check.found = version.empty() ? fmt::format("no NCCL found; {}", kUse)
                                : fmt::format("NCCL {} found; {}", version, kUse);
  if (num_gpus > 1 && version.empty()) {
    check.verdict = Verdict::kWarn;
    check.found = fmt::format("no NCCL found for {} GPUs: {}", num_gpus, error);
    check.fix =
        "sudo apt-get install libnccl2 libnccl-dev (of NVIDIA) and build again; until then "
        "--parallel.backend=threads, which sums as the CPU does and is slower";
  }
  return check;
}

Devices check_devices() {
  std::error_code ignored;
  const bool has_driver = std::filesystem::exists("/proc/driver/nvidia/version", ignored);
  Devices devices;
  std::string version, error = "this build has no CUDA";
  if constexpr (engine::kCudaBuilt) {
    try {
      const GpuFacts facts = cuda_facts();
      devices.num_gpus = facts.gpus.size();
      devices.checks.push_back(check_gpus(&facts, has_driver));
    } catch (const engine::DeviceError& e) {
      devices.checks.push_back({.name = "gpus",
                                .verdict = has_driver ? Verdict::kFail : Verdict::kOk,
                                .found = e.what(),
                                .fix = has_driver
                                           ? "nvidia-smi says whether the driver works; a reboot "
                                             "after an update of it often helps"
                                           : ""});
    }
    try {
      version = comm::nccl_version();
    } catch (const engine::DeviceError& e) {
      error = e.what();
    }
  } else {
    devices.checks.push_back(check_gpus(nullptr, has_driver));
  }
  devices.has_nccl = !version.empty();
  devices.checks.push_back(check_nccl(version, error, devices.num_gpus));
  return devices;
}

}  // namespace tessera::tools
