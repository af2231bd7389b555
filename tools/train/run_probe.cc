#include "tools/train/run_probe.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <utility>

#include "engine/error.h"
#include "engine/io/json.h"
#include "engine/io/text.h"
#include "tools/train/flags.h"

namespace tessera::tools {
namespace {

void write_text(engine::AtomicFile& file, const std::string& text) {
  file.write(std::as_bytes(std::span(text)));
}

}  // namespace

ProbeHeader probe_header(const TrainConfig& config, int num_ranks, const std::string& options) {
  ProbeHeader header{
      .ranks = num_ranks,
      .accum = config.train.accum,
      .batch = config.train.batch,
      .first_step = config.probe_steps().first,
      .reduces_last = config.train.accum > 1 && config.train.accum_comm == AccumComm::kLast,
      .options = {}};
  const nlohmann::json all = nlohmann::json::parse(options);
  for (const auto& [key, value] : all.items()) {
    // Two runs may have been started from different folders.
    const bool is_input = key == "data.path" || key == "init.from";
    header.options[key] =
        is_input ? engine::json_literal(resolve_user_path(value.get<std::string>())) : value.dump();
  }
  return header;
}

RunProbe::RunProbe(const TrainConfig& config, int num_ranks, const std::string& options)
    : path_(resolve_user_path(config.log.probe)),
      target_(config.log.probe_values),
      file_(path_),
      last_steps_(static_cast<std::size_t>(num_ranks), config.probe_steps().first - 1),
      first_step_(config.probe_steps().first) {
  const StepRange steps = config.probe_steps();
  const std::optional<ProbeKey> target =
      target_.empty() ? std::nullopt : std::optional(parse_target(target_));
  for (int rank = 0; rank < num_ranks; ++rank) {
    probes_.push_back(std::make_unique<Probe>(
        ProbeOptions{.rank = rank,
                     .num_ranks = num_ranks,
                     .first_step = steps.first,
                     .last_step = steps.last,
                     .target = target},
        [this, rank](std::int64_t step, const std::vector<ProbePart>& parts) {
          write(rank, step, parts);
        }));
  }
  write_text(file_, header_text(probe_header(config, num_ranks, options)));
}

void RunProbe::write(int rank, std::int64_t step, const std::vector<ProbePart>& parts) {
  std::string text;
  for (const ProbePart& part : parts) text += part_text(part);
  const std::lock_guard lock(mutex_);
  if (!error_.empty()) return;
  try {
    write_text(file_, text);
  } catch (const engine::IoError& e) {  // see [Note: output never ends a training] in run_log.h
    error_ = e.what();
    fmt::print(stderr, "warning: {}; the training goes on without\n", engine::escaped(error_));
    return;
  }
  num_parts_ += std::ssize(parts);
  last_steps_[static_cast<std::size_t>(rank)] = step;
}

std::int64_t RunProbe::last_step() const { return std::ranges::min(last_steps_); }

void RunProbe::write_end() {
  engine::require<engine::IoError>(error_.empty(), "{}", error_);
  write_text(file_, end_text(last_step(), num_parts_));
  file_.commit();
}

bool RunProbe::has_step() const { return last_step() >= first_step_; }

void RunProbe::commit() {
  if (!has_step() && error_.empty()) return;  // an older record is worth more
  engine::require(target_.empty() || num_parts_ > 0 || !error_.empty(),
                  "[probe] expected a tensor that the steps {} to {} have, got none of '{}' "
                  "(log.probe_values)",
                  first_step_, last_step(), target_);
  write_end();
}

void RunProbe::keep() noexcept {
  if (!has_step()) return;
  try {
    write_end();
  } catch (const std::exception& e) {
    try {
      fmt::print(stderr, "warning: {}\n", engine::escaped(e.what()));
    } catch (const std::exception&) {  // nobody is left to be told
    }
  }
}

std::string RunProbe::summary() const {
  if (!has_step()) {
    return fmt::format("probe {}: not written, as the run ended before the end of step {}",
                       engine::escaped(path_), first_step_);
  }
  return fmt::format("probe {}: {} checksums of steps {} to {}", engine::escaped(path_),
                     engine::with_commas(num_parts_), first_step_, last_step());
}

}  // namespace tessera::tools
