#include "tools/train/run_checkpoints.h"

#include <fmt/format.h>

#include <charconv>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "engine/error.h"
#include "engine/io/text.h"
#include "shard/checkpoint/agreement.h"
#include "shard/checkpoint/load.h"
#include "shard/checkpoint/manifest.h"
#include "shard/checkpoint/reader.h"
#include "tools/config/changed_settings.h"
#include "tools/config/misfit.h"

namespace tessera::tools {

using engine::escaped;
using engine::require;

namespace {

std::int64_t integer(const std::map<std::string, std::string>& values, const std::string& key,
                     const std::string& path) {
  const auto found = values.find(key);
  std::int64_t number = -1;
  if (found != values.end()) {
    const std::string& text = found->second;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || end != text.data() + text.size()) number = -1;
  }
  require<engine::IoError>(
      number >= 0, "[checkpoint] expected a number of a training, got {} (value {}, {})",
      found == values.end() ? "none" : engine::excerpt(found->second), key, path);
  return number;
}

std::string text(const std::map<std::string, std::string>& values, const std::string& key) {
  const auto found = values.find(key);
  return found == values.end() ? "" : found->second;
}

// Numbers with blanks between them, as save() writes them.
std::vector<double> numbers(const std::string& text, const std::string& path) {
  std::vector<double> values;
  for (const char *at = text.data(), *const end = at + text.size(); at != end;) {
    const auto [next, error] = std::from_chars(at, end, values.emplace_back());
    require<engine::IoError>(error == std::errc() && (next == end || *next == ' '),
                             "[checkpoint] expected losses, got {} ({})", engine::excerpt(text),
                             path);
    at = next == end ? end : next + 1;
  }
  return values;
}

// Of the checkpoint `path`, or of the newest one in it whose manifest can be read; none of a
// folder without.
std::map<std::string, std::string> saved_values(const std::string& path) {
  std::vector<std::string> paths = {path};
  try {
    for (const std::int64_t step : shard::steps_in(path)) {
      paths.push_back(shard::checkpoint_path(path, step));
    }
  } catch (const engine::IoError&) {  // it is no folder, as the error says
  }
  for (const std::string& one : paths) {
    try {
      return shard::CheckpointReader(one).manifest().values;
    } catch (const engine::IoError&) {  // as loads do, which say so
    }
  }
  return {};
}

}  // namespace

RunCheckpoints::RunCheckpoints(comm::ProcessGroup& world, shard::Fsdp& fsdp,
                               shard::Optimizer& optimizer, const TrainConfig& config,
                               RunIdentity identity, RunLog* log)
    : world_(world),
      config_(config),
      identity_(std::move(identity)),
      log_(log),
      parts_({{&fsdp, &optimizer}}),
      folder_(config.checkpoint.folder(config.out)) {
  if (!config.checkpoint.saves()) return;
  shard::CheckpointerOptions options{.folder = folder_,
                                     .keep = static_cast<int>(config.checkpoint.keep),
                                     .async = config.checkpoint.async,
                                     .warn = [this](std::string_view line) { warn(line); }};
  checkpointer_ = std::make_unique<shard::Checkpointer>(world, parts_, std::move(options));
}

void RunCheckpoints::say(const std::string& line, Console::Style style) const {
  if (log_ != nullptr) log_->say(engine::escaped_lines(line), style);
}

void RunCheckpoints::warn(std::string_view line) const {
  say(fmt::format("warning: {}", line), Console::Style::kWarning);
}

void RunCheckpoints::check_is_new() {
  try {
    checkpointer_->check_is_new();
  } catch (const engine::InvalidArgument& e) {
    engine::fail(
        "{}; --resume=auto goes on from it, another --out or --checkpoint.dir begins a new run",
        e.what());
  }
}

// Collective: whether `path` is a checkpoint or a folder of them, as rank 0 sees it.
bool RunCheckpoints::is_one_checkpoint(const std::string& path) const {
  const shard::Report seen = shard::report_of([&]() -> std::string {
    if (world_.rank() != 0) return "";
    std::error_code ignored;
    require(std::filesystem::is_directory(path, ignored),
            "[checkpoint] expected none, auto or a folder with a checkpoint, got '{}' (resume)",
            config_.checkpoint.resume);
    // A folder of checkpoints has no manifest, a damaged checkpoint may have none: by its name
    // then.
    const bool is_one =
        std::filesystem::exists(fmt::format("{}/{}", path, shard::kManifestName), ignored) ||
        shard::steps_in(path).empty();
    return is_one ? "one" : "several";
  });
  const shard::Fsdp& fsdp = *parts_.front().fsdp;
  return shard::exchange({world_, fsdp.memory(), fsdp.compute()}, seen, "what is resumed")
             .front() == "one";
}

// None if there is none.
std::optional<shard::LoadedCheckpoint> RunCheckpoints::load() {
  const CheckpointConfig& c = config_.checkpoint;
  // Weight decay is the configuration's, which may have changed.
  const shard::LoadOptions options{.strict = c.strict, .groups = false};
  const auto warn = [this](std::string_view line) { this->warn(line); };
  if (c.resume == "auto") {
    return checkpointer_ != nullptr
               ? checkpointer_->load_newest(options)
               : shard::load_newest_checkpoint(world_, parts_, folder_, options, warn);
  }
  const std::string path = resolve_user_path(c.resume);
  std::optional<shard::LoadedCheckpoint> loaded =
      is_one_checkpoint(path) ? shard::load_checkpoint(world_, parts_, path, options)
                              : shard::load_newest_checkpoint(world_, parts_, path, options, warn);
  if (checkpointer_ != nullptr) checkpointer_->continue_from(*loaded);
  return loaded;
}

TrainPosition RunCheckpoints::resume() {
  if (!config_.checkpoint.resumes()) {
    if (checkpointer_ != nullptr) check_is_new();
    return {};
  }
  std::optional<shard::LoadedCheckpoint> loaded;
  try {
    loaded = load();
  } catch (const engine::InvalidArgument& e) {
    const std::string& where = config_.checkpoint.resume;
    const auto saved = saved_values(where == "auto" ? folder_ : resolve_user_path(where));
    engine::fail("{}",
                 misfit_text(e.what(), changed_settings(text(saved, "config"), identity_.config)));
  }
  if (loaded) return take_over(*loaded);
  say(fmt::format("no checkpoint in {}: a new run", escaped(folder_)));
  return {};
}

void RunCheckpoints::tell_changes(const shard::LoadedCheckpoint& loaded) const {
  const auto& values = loaded.values;
  const std::string data = text(values, "data"), digest = text(values, "data_digest");
  // What was saved without a digest is known by its name alone.
  const bool is_known = !digest.empty() && !identity_.data_digest.empty();
  if (is_known ? digest != identity_.data_digest : data != identity_.data) {
    warn(data == identity_.data
             ? fmt::format("other data: {} has changed since the checkpoint was saved", data)
             : fmt::format("other data: {} (was {})", identity_.data, data));
  }
  if (world_.size() != loaded.ranks) {
    say(fmt::format("  changed: parallel.ranks={} (was {})", world_.size(), loaded.ranks));
  }
  const std::vector<std::string> settings =
      changed_settings(text(values, "config"), identity_.config);
  for (const std::string& line : settings) say("  changed: " + line);
  if (moves_samples(settings)) {
    say("  so a sample is another than it would have been, and until this epoch ends some data may "
        "come twice and others not at all");
  }
  const std::vector<std::string> arithmetic =
      changed_values(text(values, "arithmetic"), identity_.arithmetic);
  for (const std::string& line : arithmetic) say("  changed: " + line);
  if (arithmetic.empty()) return;
  say("  so sums are rounded otherwise, and what follows has other bits than it would have had");
}

TrainPosition RunCheckpoints::take_over(const shard::LoadedCheckpoint& loaded) {
  const auto& values = loaded.values;
  const std::string model = text(values, "model");
  if (model != identity_.model) {
    const std::string error = fmt::format(
        "[checkpoint] expected a checkpoint of this model, {}, got one of {} ({})", identity_.model,
        model.empty() ? "another program" : engine::excerpt(model), loaded.path);
    engine::fail("{}",
                 with_changes(error, changed_settings(text(values, "config"), identity_.config)));
  }
  const TrainPosition position{.step = loaded.step,
                               .sample = integer(values, "next_sample", loaded.path),
                               .num_skips = integer(values, "num_skips", loaded.path),
                               .losses = numbers(text(values, "losses"), loaded.path)};
  require(position.step <= config_.train.steps,
          "[checkpoint] expected train.steps of at least the {} that are done, got {} ({})",
          position.step, config_.train.steps, loaded.path);
  last_saved_ = position.step;
  newest_ = loaded.path;
  if (checkpointer_ != nullptr) newest_step_ = position.step;
  say(fmt::format("resumed after step {} of {} rank{}, at sample {} ({})", position.step,
                  loaded.ranks, loaded.ranks == 1 ? "" : "s", position.sample,
                  escaped(loaded.path)),
      Console::Style::kStrong);
  const auto named =
      shard::step_of_name(std::filesystem::weakly_canonical(loaded.path).filename().string());
  if (named && *named != loaded.step) {
    warn(shard::misnamed_text(loaded.path, loaded.step));
  }
  for (const std::string& line : loaded.differences) say("  not loaded: " + line);
  tell_changes(loaded);
  return position;
}

bool RunCheckpoints::is_due(std::int64_t step) const {
  return checkpointer_ != nullptr && step % config_.checkpoint.every == 0;
}

void RunCheckpoints::save(const TrainPosition& position) {
  if (checkpointer_ == nullptr || position.step == last_saved_) return;
  finish();
  last_saved_ = position.step;
  checkpointer_->save(position.step,
                      {{"next_sample", std::to_string(position.sample)},
                       {"num_skips", std::to_string(position.num_skips)},
                       {"losses", fmt::format("{}", fmt::join(position.losses, " "))},
                       {"model", identity_.model},
                       {"data", identity_.data},
                       {"data_digest", identity_.data_digest},
                       {"arithmetic", identity_.arithmetic},
                       {"config", identity_.config}});
  if (!checkpointer_->is_saving()) told(position.step);
}

void RunCheckpoints::poll() {
  if (checkpointer_ != nullptr) told(checkpointer_->poll());
}

void RunCheckpoints::finish() {
  if (checkpointer_ != nullptr) told(checkpointer_->wait());
}

void RunCheckpoints::told(std::optional<std::int64_t> step) {
  if (!step) return;
  newest_ = shard::checkpoint_path(folder_, *step);
  newest_step_ = step;
  if (config_.log.every > 0)
    say(fmt::format("checkpoint of step {} in {}", *step, escaped(newest_)));
}

}  // namespace tessera::tools
