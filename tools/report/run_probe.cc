#include "tools/report/run_probe.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <utility>

#include "comm/host_gather.h"
#include "engine/error.h"
#include "engine/io/json.h"
#include "engine/io/text.h"
#include "tools/cli/error_output.h"
#include "tools/cli/flags.h"
#include "tools/config/data/input_option.h"

namespace tessera::tools {
namespace {

constexpr std::int64_t kMaxEndNbytes = 256;

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
    header.options[key] = names_inputs(key)
                              ? engine::json_literal(resolved_inputs(key, value.get<std::string>()))
                              : value.dump();
  }
  return header;
}

RunProbe::RunProbe(const TrainConfig& config, const LocalRanks& ranks, const std::string& options,
                   std::int64_t max_nbytes)
    : config_(config),
      ranks_(ranks),
      path_(ranks.file_of(resolve_user_path(config.log.probe))),
      target_(config.log.probe_values),
      file_(path_),
      header_(probe_header(config, ranks.world_size, options)),
      last_steps_(static_cast<std::size_t>(ranks.count), config.probe_steps().first - 1),
      num_parts_(static_cast<std::size_t>(ranks.count)),
      steps_(config.probe_steps()),
      max_nbytes_(max_nbytes) {
  header_.first_rank = ranks.first;
  header_.local_ranks = ranks.count;
  const std::optional<ProbeKey> target =
      target_.empty() ? std::nullopt : std::optional(parse_target(target_));
  for (const int rank : ranks.all()) {
    probes_.push_back(std::make_unique<Probe>(
        ProbeOptions{.rank = rank,
                     .num_ranks = ranks.world_size,
                     .first_step = steps_.first,
                     .last_step = steps_.last,
                     .target = target},
        [this, rank](std::int64_t step, const std::vector<ProbePart>& parts) {
          write(rank, step, parts);
        }));
  }
}

void RunProbe::describe(const std::string& data_digest,
                        const std::map<std::string, std::string>& arithmetic) {
  const std::lock_guard lock(mutex_);
  header_.data_digest = data_digest;
  header_.arithmetic = arithmetic;
}

// All ranks say the same, and some may have made steps before others say it.
void RunProbe::start_after(std::int64_t start, comm::ProcessGroup& world,
                           const engine::Stream& stream) {
  std::string run;  // no other run has it: files that earlier ones left are not of this one
  if (!ranks_.are_all()) {
    std::random_device random;
    const std::uint64_t number = (std::uint64_t{random()} << 32) | random();
    run = comm::gather_texts(world, fmt::format("{:016x}", number), engine::Memory(stream), stream,
                             "the probe's run")
              .front();
  }
  const std::lock_guard lock(mutex_);
  header_.run = run;
  if (start == start_) return;
  start_ = start;
  steps_ = config_.probe_steps(start);
  header_.first_step = steps_.first;
  std::ranges::fill(last_steps_, steps_.first - 1);
}

void RunProbe::end(comm::ProcessGroup& world, const engine::Stream& stream) {
  if (ranks_.are_all()) return;
  const std::int64_t mine = num_parts_[ranks_.index(world.rank())];
  const auto all = comm::gather_to_host<std::int64_t>(
      world, std::span(&mine, 1), engine::Memory(stream), stream, "the probe's parts");
  const std::lock_guard lock(mutex_);
  num_parts_of_all_ = std::accumulate(all.begin(), all.end(), std::int64_t{0});
}

void RunProbe::append_header() {
  if (!std::exchange(has_header_, true)) append(header_text(header_));
}

void RunProbe::append(const std::string& text) {
  nbytes_ += std::ssize(text);
  engine::require<engine::IoError>(
      nbytes_ <= max_nbytes_ - kMaxEndNbytes,
      "[probe] expected a record of at most {} bytes, got more: log.probe_steps may ask for fewer "
      "steps ({})",
      engine::with_commas(max_nbytes_), path_);
  file_.write(std::as_bytes(std::span(text)));
}

void RunProbe::write(int rank, std::int64_t step, const std::vector<ProbePart>& parts) {
  std::string text;
  for (const ProbePart& part : parts) text += part_text(part);
  const std::lock_guard lock(mutex_);
  if (!error_.empty()) return;
  try {
    append_header();
    append(text);
  } catch (const engine::IoError& e) {  // see [Note: output never ends a training] in run_log.h
    error_ = e.what();
    write_to_stderr({"warning: ", engine::escaped(error_), "; the training goes on without\n"},
                    kWarningPatience);
    return;
  }
  num_parts_[ranks_.index(rank)] += std::ssize(parts);
  if (!parts.empty()) newest_step_ = std::max(newest_step_, step);
  if (!has_gone_wrong_) last_steps_[ranks_.index(rank)] = step;
}

std::int64_t RunProbe::last_step() const { return std::ranges::min(last_steps_); }

std::int64_t RunProbe::num_local_parts() const {
  return std::accumulate(num_parts_.begin(), num_parts_.end(), std::int64_t{0});
}

std::int64_t RunProbe::num_parts() const {
  return ranks_.are_all() ? num_local_parts() : num_parts_of_all_;
}

void RunProbe::write_end() {
  engine::require<engine::IoError>(error_.empty(), "{}", error_);
  append_header();
  const std::int64_t last = last_step();
  const std::string end = end_text(last, num_local_parts(), newest_step_ > last ? last + 1 : 0);
  file_.write(std::as_bytes(std::span(end)));
  file_.commit();
}

bool RunProbe::has_step() const { return last_step() >= steps_.first; }

void RunProbe::commit() {
  if (!has_step() && error_.empty()) return;  // an older record is worth more
  engine::require(target_.empty() || num_parts() > 0 || !error_.empty(),
                  "[probe] expected a tensor that the steps {} to {} have, got none of '{}' "
                  "(log.probe_values)",
                  steps_.first, last_step(), target_);
  write_end();
}

void RunProbe::keep() noexcept {
  try {
    has_gone_wrong_ = true;
    for (const auto& probe : probes_) probe->end_step();
    if (has_step() || newest_step_ > 0) write_end();
  } catch (const std::exception& e) {
    try {
      write_to_stderr({"warning: ", engine::escaped_lines(e.what()), "\n"}, kWarningPatience);
    } catch (const std::exception&) {  // nobody is left to be told
    }
  }
}

std::string RunProbe::summary() const {
  if (!has_step()) {
    return fmt::format("probe {}: not written, as {}", engine::escaped(path_),
                       why_none_of(steps_, start_));
  }
  return fmt::format("probe {}: {} checksums of steps {} to {}", engine::escaped(path_),
                     engine::with_commas(num_parts()), steps_.first, last_step());
}

}  // namespace tessera::tools
