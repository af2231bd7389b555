#include "tools/compare/training_identity.h"

#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/text.h"
#include "tools/compare/request/training_process.h"
#include "tools/config/data/token_data_config.h"
#include "tools/data/data_digest.h"
#include "tools/data/mix_order.h"
#include "tools/data/token_file.h"
#include "tools/data/token_mix.h"
#include "tools/launch/arithmetic.h"
#include "tools/launch/cpu.h"
#include "tools/launch/ranks.h"
#include "tools/machine/environment.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;
using engine::IoError;
using engine::require;

// What follows kTellArithmetic: device, who moves tensors, and the three options of the CPU.
constexpr std::size_t kNumArguments = 5;
constexpr std::string_view kGpu = "gpu", kNccl = "nccl";

std::vector<std::string> arguments_of(const Configuration& c) {
  const Ranks ranks = Ranks::choose(c.config, c.launch);
  const CpuConfig& cpu = c.config.cpu;
  return {std::string(kTellArithmetic),
          std::string(ranks.num_gpus > 0 ? kGpu : "cpu"),
          std::string(ranks.nccl ? kNccl : "threads"),
          cpu.isa,
          cpu.gemm,
          std::to_string(cpu.threads_per_rank)};
}

}  // namespace

std::string IdentityNow::data_digest(const Configuration& c) {
  const TokenDataConfig& data = c.config.data;
  std::vector<std::string> digests;
  std::vector<double> weights;
  for (const TokenSource& source : data.sources()) {
    std::string& digest = digests_[data.reading(source, c.config.init_from)];
    if (digest.empty()) digest = digest_of(data.open(source, c.config.read_tokenizer()));
    digests.push_back(digest);
    weights.push_back(source.weight);
  }
  return digest_of_mix(digests, MixOrder(weights, 0).quotas());
}

std::string IdentityNow::arithmetic(const Configuration& c) {
  const std::vector<std::string> arguments = arguments_of(c);
  std::string& text = arithmetics_[engine::join(arguments, " ")];
  if (!text.empty()) return text;
  std::error_code error;
  const std::string self = fs::read_symlink("/proc/self/exe", error).string();
  require<IoError>(!error, "[compare] expected the path of this program, got {}", error.message());
  const ProcessEnd end = run_process(self, arguments, scratch_);
  constexpr std::int64_t kMaxNbytes = 1 << 20;
  std::string said = engine::read_text_file(scratch_, kMaxNbytes);
  fs::remove(scratch_, error);
  require<IoError>(end.ok(), "[compare] expected a process that tells the arithmetic, got {}: {}",
                   end.str(), engine::excerpt(said));
  return text = std::move(said);
}

std::string why_again(const TrainingIdentity& then, const TrainingIdentity& now) {
  if (then.data_digest.empty()) return "it does not say which data it had";
  if (then.data_digest != now.data_digest) return "the data have changed";
  if (then.arithmetic == now.arithmetic) return "";
  if (then.arithmetic.empty()) return "it does not say which arithmetic it had";
  std::vector<std::string> changes;
  const auto before = arithmetic_values(then.arithmetic);
  for (const auto& [name, value] : arithmetic_values(now.arithmetic)) {
    const auto found = before.find(name);
    const std::string was = found == before.end() ? "not told" : found->second;
    if (was != value) changes.push_back(fmt::format("{}={} (was {})", name, value, was));
  }
  return "the arithmetic has changed: " + engine::escaped(engine::join(changes, ", "));
}

void tell_arithmetic(std::span<const char* const> arguments) {
  require(arguments.size() == kNumArguments, "[compare] expected {} arguments, got {} ({})",
          kNumArguments, arguments.size(), kTellArithmetic);
  const Ranks ranks{.num_gpus = arguments[0] == kGpu ? 1 : 0, .nccl = arguments[1] == kNccl};
  choose_cpu(
      {.isa = arguments[2], .gemm = arguments[3], .threads_per_rank = count_of(arguments[4])});
  fmt::print("{}", arithmetic_text(ranks, gpu_text(ranks), nullptr));
}

}  // namespace tessera::tools
