// What is compared: every combination of the values that options are to take.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::tools {

/// An option of the trainer, and the values it takes in turn.
struct SweepAxis {
  std::string key;
  std::vector<std::string> values;

  friend bool operator==(const SweepAxis&, const SweepAxis&) = default;
};

/// Options and their values, as on a command line.
using Overrides = std::vector<std::pair<std::string, std::string>>;

inline constexpr std::int64_t kMaxConfigurations = 256;

/// "ddp,zero3". Throws InvalidArgument naming `key` for an empty value or one that stands twice.
SweepAxis parse_axis(std::string_view key, std::string_view values);

/// "parallel.prefetch=0,1,2 offload.optimizer=0,1": as parse_axis(), and throws for a key that
/// stands twice, has no values, or is none that a comparison may set: outputs, files of options,
/// and the rates that plans are made with, unless `only_plans`.
std::vector<SweepAxis> parse_sweep(std::string_view text, bool only_plans = false);

/// Every combination, values of the last axis changing fastest; one without overrides if there is
/// no axis. Throws InvalidArgument for more than kMaxConfigurations.
std::vector<Overrides> combinations(std::span<const SweepAxis> axes);

/// One configuration: "parallel.strategy=ddp train.accum=2"; a word alone is a strategy. Throws
/// InvalidArgument for a key that stands twice, or is none that a comparison may set.
Overrides parse_overrides(std::string_view text);

/// Whether `text` means the record of a run, a file or a folder with one: what is no strategy and
/// exists, ends in ".jsonl", or has a '/' and no '='.
bool is_record_path(const std::string& text);
/// The file: of a folder its probe.jsonl.
std::string record_path(const std::string& text);

/// The trainer's options: of a parallel.strategy such as "hsdp:2", parallel.shard_ranks as well.
/// Throws InvalidArgument for what is no hybrid, or no number, after a colon.
Overrides options_of(const Overrides& overrides);

/// What people call it: "zero3 prefetch=1 offload.optimizer=0"; "as given" without overrides.
std::string name_of(const Overrides& overrides);

/// A name for its folder: letters, digits and ".=-_" of the name, all else a "_".
std::string folder_name_of(std::string_view name);

}  // namespace tessera::tools
