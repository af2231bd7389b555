#include "tools/programs/run/gemm_choice.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include "comm/host_gather.h"
#include "engine/cuda.h"
#include "engine/io/file.h"
#include "engine/io/text.h"
#include "engine/memory.h"
#include "engine/stream.h"
#include "tools/cli/flags.h"
#include "tools/planning/task_plan.h"

namespace tessera::tools {
namespace {

constexpr std::int64_t kMaxNbytes = std::int64_t{64} << 20;

}  // namespace

std::shared_ptr<engine::GemmAlgorithms> choose_gemm_algorithms(const Task& task, const Ranks& ranks,
                                                               RunLog& log) {
  const CudaConfig& config = task.config().cuda;
  const bool has_file = !config.gemm_algorithms.empty();
  if (ranks.num_gpus == 0 || (!has_file && !config.tune_gemm)) return nullptr;
  const std::string path =
      has_file ? resolve_user_path(config.gemm_algorithms) : log.folder() + "/gemm_algorithms.txt";
  auto algorithms = std::make_shared<engine::GemmAlgorithms>();
  std::error_code ignored;
  if (!config.tune_gemm || std::filesystem::exists(path, ignored)) {
    algorithms->load(engine::read_text_file(path, kMaxNbytes), path);
  }
  if (!config.tune_gemm) return algorithms;
  if constexpr (engine::kCudaBuilt) {
    const auto begin = std::chrono::steady_clock::now();
    const std::vector<engine::DeviceProduct> gemms = gemms_of(task, ranks);
    std::size_t num_timed = 0;
    // Of one kind only the first has to time. Of several processes rank 0's GPU alone is asked: on
    // another one its rank waits for what is chosen here, and freeing memory there waits for that.
    for (int i = 0; i < (ranks.are_processes() ? 1 : ranks.num_gpus); ++i) {
      const auto gpu = engine::Stream::cuda("tuning", ranks.first_gpu + i);
      num_timed += tune_gemms(gpu, gemms, *algorithms).size();
    }
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    if (num_timed > 0) {
      engine::AtomicFile file(path);
      const std::string text = algorithms->text();
      file.write(std::as_bytes(std::span(text)));
      file.commit();
    }
    log.say(fmt::format("matrix products: {} timed in {:.1f} s, algorithms in {}", num_timed,
                        elapsed.count(), engine::escaped(path)));
  }
  return algorithms;
}

std::shared_ptr<engine::GemmAlgorithms> share_gemm_algorithms(comm::ProcessGroup& world,
                                                              const engine::Stream& compute,
                                                              const Task& task, const Ranks& ranks,
                                                              RunLog* log) {
  std::shared_ptr<engine::GemmAlgorithms> algorithms;
  if (log != nullptr) {
    const auto pause = world.pause_deadline();
    algorithms = choose_gemm_algorithms(task, ranks, *log);
  }
  const std::string mine = algorithms == nullptr ? "" : algorithms->text();
  const std::string chosen = comm::gather_texts(world, mine, engine::Memory(compute), compute,
                                                "algorithms of products")[0];
  if (log != nullptr || chosen.empty()) return algorithms;
  algorithms = std::make_shared<engine::GemmAlgorithms>();
  algorithms->load(chosen, "what rank 0 has chosen");
  return algorithms;
}

}  // namespace tessera::tools
