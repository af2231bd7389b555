#include "tools/compare/request/shared_checks.h"

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "engine/error.h"
#include "engine/io/file.h"
#include "tools/launch/cpu.h"

namespace tessera::tools {

using engine::require;

namespace {

// The CPU is chosen once in a process, so another one tries. What it says when it cannot; empty if
// it can.
std::string cpu_error(const CpuConfig& cpu) {
  std::array<int, 2> ends{};
  require<engine::DeviceError>(::pipe(ends.data()) == 0, "[cpu] expected a pipe, got none");
  const pid_t child = ::fork();
  if (child == 0) {
    std::string message;
    try {
      choose_cpu(cpu);
    } catch (const std::exception& e) {
      message = e.what();
    }
    [[maybe_unused]] const auto written = ::write(ends[1], message.data(), message.size());
    std::_Exit(0);
  }
  engine::FileDescriptor in(ends[0]);
  engine::FileDescriptor(ends[1]).close();
  require<engine::DeviceError>(child > 0, "[cpu] expected a process to start, got none");
  std::string message;
  std::array<char, 512> part{};
  for (ssize_t n = 0; (n = ::read(in.get(), part.data(), part.size())) > 0;) {
    message.append(part.data(), static_cast<std::size_t>(n));
  }
  int status = 0;
  const bool has_ended = ::waitpid(child, &status, 0) == child;
  if (!has_ended || !WIFEXITED(status) || WEXITSTATUS(status) != 0)
    return "[cpu] expected an answer, got none";
  return message;
}

}  // namespace

void SharedChecks::cpu(const CpuConfig& cpu) {
  const std::string key = fmt::format("{} {} {}", cpu.isa, cpu.gemm, cpu.threads_per_rank);
  if (!cpus_.insert(key).second) return;
  const std::string message = cpu_error(cpu);
  require(message.empty(), "{}", message);
}

void SharedChecks::data(TransformerConfig& config, const ModelConfig& model) {
  const TokenDataConfig& d = config.data;
  config.settle_loss_mean(d.keeps_documents());
  std::string key =
      fmt::format("{}\n{}\n{} {} {} {} {} {}", d.mix, config.init_from, config.model.seq, model.seq,
                  model.vocab, d.val_fraction, int(d.order), d.packing);
  for (const TokenSource& source : d.sources()) key += '\n' + d.reading(source, config.init_from);
  if (!data_.insert(key).second) return;
  const TokenMix tokens = config.dataset(model, config.read_tokenizer());
  for (const std::string& line : config.warnings(tokens, model)) {
    if (warnings_.insert(line).second) fmt::print(stderr, "warning: {}\n", line);
  }
}

void SharedChecks::files(const std::vector<RunFile>& files) {
  for (const RunFile& file : files) {
    if (paths_.insert(file.path).second) inputs_.push_back(file);
  }
}

}  // namespace tessera::tools
