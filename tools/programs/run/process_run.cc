#include "tools/programs/run/process_run.h"

#include <fmt/format.h>

#include <cstddef>
#include <filesystem>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/io/text.h"
#include "tools/cli/run_files.h"
#include "tools/config/train_config.h"
#include "tools/io/file_digest.h"
#include "tools/launch/arithmetic.h"
#include "tools/launch/program_digest.h"

namespace tessera::tools {
namespace {

bool has_checkpoints(const Task& task) {
  const CheckpointConfig& config = task.config().checkpoint;
  return config.saves() || config.resumes();
}

// Of other runs no GPU is asked what it is.
bool asks_for_arithmetic(const Ranks& ranks, const Task& task) {
  return ranks.are_processes() || has_checkpoints(task) || !task.config().log.probe.empty();
}

template <class T, class... Args>
std::unique_ptr<T> make_if(bool asked_for, const Args&... args) {
  return asked_for ? std::make_unique<T>(args...) : nullptr;
}

// The files that every process reads, as difference_of_processes() takes settings.
std::string files_text(const std::vector<RunFile>& files) {
  std::string text;
  for (const RunFile& file : files) {
    text += fmt::format("[{}]\n{} = {}\n", file.option,
                        engine::escaped(std::filesystem::path(file.path).filename().string()),
                        digest_of_file(file.path));
  }
  return text;
}

}  // namespace

ProcessRun::ProcessRun(const Ranks& ranks, const Task& task, const FlagSet& flags,
                       const FlightOutput& flight)
    : ranks(ranks),
      task(task),
      config_toml(flags.to_toml()),
      flight(flight),
      data_digest(task.data_digest()),
      files(ranks.are_processes() ? files_text(task.files_read()) : ""),
      gpu(asks_for_arithmetic(ranks, task) ? gpu_text(ranks) : ""),
      trace(make_if<RunTrace>(!task.config().log.trace.empty(), task.config(), ranks.local)),
      probe(make_if<RunProbe>(!task.config().log.probe.empty(), task.config(), ranks.local,
                              flags.to_json())),
      audits(make_if<Audits>(task.config().audit, ranks.local)) {}

RunIdentity ProcessRun::identity() const {
  if (!has_checkpoints(task)) return {};
  return {.model = task.model_text(),
          .data = task.data_text(),
          .config = config_toml,
          .data_digest = data_digest,
          .arithmetic = arithmetic()};
}

std::string ProcessRun::arithmetic() const { return arithmetic_text(ranks, gpu, gemms.get()); }

std::string ProcessRun::text() const {
  std::string config = config_toml;
  constexpr std::string_view kOfHost = "\ninterface = ";  // may be an address of one host
  if (const std::size_t at = config.find(kOfHost); at != std::string::npos) {
    config.erase(at, config.find('\n', at + 1) - at);
  }
  return fmt::format(
      "program.digest = {}\n{}[data]\ndigest = {}\n{}[launch]\nranks_of_a_replica = {}\n"
      "[arithmetic]\n{}",
      program_digest(), config, data_digest, files, ranks.replica().first, arithmetic());
}

void ProcessRun::keep() noexcept {
  if (probe != nullptr) probe->keep();
  if (trace != nullptr) trace->keep();
}

}  // namespace tessera::tools
