#include "shard/checkpoint/checkpointer.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <exception>
#include <filesystem>
#include <new>
#include <random>
#include <system_error>
#include <thread>
#include <utility>

#include "comm/host_gather.h"
#include "engine/error.h"
#include "engine/io/late_files.h"
#include "engine/io/text.h"
#include "shard/checkpoint/manifest.h"
#include "shard/checkpoint/writer.h"
#include "shard/cut_values.h"

namespace tessera::shard {

using engine::InvalidArgument;
using engine::IoError;
using engine::require;

namespace {

// By how much a thread that writes while ranks train is nicer than they: a third of their weight.
constexpr int kNice = 5;

std::uint64_t draw() {
  std::random_device device;
  return std::uint64_t{device()} << 32 | device();
}

/// Work in a thread of its own, or none.
class Job {
 public:
  ~Job() { wait(); }

  /// Runs `fn`: if `beside`, in a thread of its own, else before this returns.
  template <class F>
  void start(F fn, bool beside) noexcept {
    wait();
    is_done_ = false;
    const auto run = [this, fn] {
      report_ = report_of(fn);
      is_done_ = true;
    };
    if (!beside) return run();
    try {
      thread_ = std::thread([run] {
        // Of this thread alone, on Linux: ranks that compute come first, at three times its share.
        // With less, whoever waits for it would wait for all other programs of a busy machine.
        [[maybe_unused]] const int nice = ::nice(kNice);
        run();
      });
    } catch (const std::exception&) {
      run();  // no thread to be had: slower, and all the same
    }
  }
  bool is_done() const { return is_done_; }
  void wait() {
    if (thread_.joinable()) thread_.join();
  }
  /// Of what is done.
  const Report& report() {
    wait();
    return report_;
  }

 private:
  std::thread thread_;
  std::atomic<bool> is_done_ = true;
  Report report_;
};

/// Throws InvalidArgument for what would come back as something else, or not at all.
void check_values(const Manifest& about) {
  for (const auto& [key, value] : about.values) {
    require(engine::is_utf8(key) && engine::is_utf8(value),
            "[checkpoint] expected values in UTF-8, got {} = {}", engine::excerpt(key),
            engine::excerpt(value));
  }
  for (const CheckpointOptimizer& optimizer : about.optimizers) {
    for (const CheckpointGroup& g : optimizer.groups) {
      require(engine::is_utf8(g.name) && std::isfinite(g.lr_scale) && std::isfinite(g.weight_decay),
              "[checkpoint] expected parameter groups of finite values, got {}, {} ({})",
              g.lr_scale, g.weight_decay, engine::excerpt(g.name));
    }
  }
}

engine::Stream stream_beside(const std::vector<CheckpointPart>& parts) {
  require(!parts.empty() && parts.front().fsdp != nullptr,
          "[checkpoint] expected something to save, got no parts");
  return parts.front().fsdp->compute().sibling("checkpoint");
}

/// Throws IoError unless the files that all ranks wrote are there, with their sizes.
void check_files(const std::string& folder, const Manifest& manifest) {
  for (const CheckpointFile& file : manifest.files) {
    const std::string path = fmt::format("{}/{}", folder, file.name);
    struct stat status {};
    int error = 0;
    const bool is_there = engine::seen_late(path, [&] {
      error = ::stat(path.c_str(), &status) == 0 ? 0 : errno;
      return error == 0 && status.st_size == file.nbytes;
    });
    require<IoError>(
        is_there,
        "[checkpoint] expected the {} bytes that a rank wrote, got {}: the folder must "
        "be one that all ranks share ({})",
        file.nbytes,
        error == 0 ? fmt::format("{}", status.st_size) : std::generic_category().message(error),
        path);
  }
}

}  // namespace

struct Checkpointer::Save {
  enum class Phase { kWriting, kPublishing };

  CheckpointOrigin origin;
  std::string temporary;
  Manifest about;  // without files and tensors
  std::vector<CheckpointPiece> pieces;
  std::vector<std::string> written;  // by each rank: manifests
  engine::Event taken;
  Phase phase = Phase::kWriting;
  Job job;  // dies first
};

Checkpointer::Checkpointer(comm::ProcessGroup& world, std::vector<CheckpointPart> parts,
                           CheckpointerOptions options)
    : world_(world),
      parts_(std::move(parts)),
      options_(std::move(options)),
      stream_(stream_beside(parts_)) {
  const Report opened = report_of([&]() -> std::string {
    require(!options_.folder.empty() && options_.keep >= 0,
            "[checkpoint] expected a folder and a number of checkpoints to keep, got '{}' and {}",
            options_.folder, options_.keep);
    if (world_.rank() != 0) return "";
    folder_ = std::make_unique<CheckpointFolder>(options_.folder);
    return fmt::format("{:016x}{:016x}", draw(), draw());
  });
  run_ = exchange(meeting(), opened, "checkpoints").front();
}

Checkpointer::~Checkpointer() {
  if (save_ != nullptr) give_up();
}

void Checkpointer::give_up() noexcept {
  save_->job.wait();
  if (folder_ != nullptr) CheckpointFolder::remove(save_->temporary);
  save_.reset();
}

Meeting Checkpointer::meeting() const { return {world_, parts_[0].fsdp->memory(), stream_}; }

void Checkpointer::warn(std::string_view text) const {
  if (world_.rank() == 0 && options_.warn) options_.warn(text);
}

std::int64_t Checkpointer::copy_nbytes() const {
  return snapshot_ == nullptr ? 0 : snapshot_->nbytes();
}

// Saving
// -----------------------------------------------------------------------------------------

void Checkpointer::save(std::int64_t step, std::map<std::string, std::string> values) {
  wait();
  // Not below, where it would be told to ranks that wait for what has failed here.
  for (const CheckpointPart& part : parts_) part.fsdp->synchronize();
  const Report begun = report_of([&]() -> std::string {
    save_ = std::make_unique<Save>();
    save_->origin = {.run = run_, .step = step, .rank = world_.rank(), .num_ranks = world_.size()};
    check_step(step);
    begin(std::move(values));
    return world_.rank() == 0 ? temporary_path(options_.folder, step, draw()) : "";
  });
  try {
    const std::string label = fmt::format("checkpoint of step {}", step);
    save_->temporary = exchange(meeting(), begun, label).front();
  } catch (...) {
    save_.reset();
    throw;
  }
  const auto write = [this, save = save_.get()] {
    const auto pause = options_.async ? nullptr : world_.pause_deadline();
    save->taken.wait();
    return to_text(write_pieces(save->temporary, save->origin, save->pieces));
  };
  save_->job.start(write, options_.async);
  if (!options_.async) wait();
}

// On rank 0: a warning if the checkpoint called step_`step` is found, for the first time, to be of
// another step; otherwise empty.
std::string Checkpointer::reject_if_misnamed(std::int64_t step) {
  if (rejected_.contains(step) || named_.contains(step)) return "";
  const std::optional<std::int64_t> other = misnamed_step(options_.folder, step);
  (other ? rejected_ : named_).insert(step);
  if (!other) return "";
  return fmt::format("passed over: {}",
                     misnamed_text(checkpoint_path(options_.folder, step), *other));
}

// On rank 0: whether the checkpoint called step_`step` is of another step, or did not verify.
bool Checkpointer::passes_over(std::int64_t step) {
  const std::string warning = reject_if_misnamed(step);
  if (!warning.empty()) warn(warning);
  return rejected_.contains(step);
}

// Throws InvalidArgument if a reader, or prune(), would take another checkpoint for the newest.
void Checkpointer::check_step(std::int64_t step) {
  require(step >= 0, "[checkpoint] expected a number of steps, got {}", step);
  if (world_.rank() != 0) return;
  for (const std::int64_t there : steps_in(options_.folder)) {
    require(there < step || passes_over(there),
            "[checkpoint] expected a step after those in the folder, got {} where there is {}: "
            "load what is there first, or name another folder ({})",
            step, there, options_.folder);
  }
}

// What is to be saved, copied where it would change or cannot be read.
void Checkpointer::begin(std::map<std::string, std::string> values) {
  Manifest& about = save_->about;
  about.step = save_->origin.step;
  about.run = run_;
  about.ranks = world_.size();
  about.plan = fmt::format("{:016x}", parts_[0].fsdp->plan_hash());
  about.values = std::move(values);
  for (const CheckpointPart& part : parts_) {
    if (part.optimizers.empty()) about.optimizers.emplace_back();
    for (const Optimizer* one : part.optimizers) {
      CheckpointOptimizer& optimizer = about.optimizers.emplace_back();
      optimizer.num_steps = one->num_steps();
      for (const ParameterGroup& g : one->groups()) {
        optimizer.groups.push_back({g.name, g.lr_scale, g.weight_decay});
      }
    }
  }
  check_values(about);
  save_->pieces = pieces_of(parts_);
  const engine::Stream& compute = parts_[0].fsdp->compute();
  if (!options_.async && compute.device().is_host()) {
    compute.synchronize();
    return;
  }
  if (snapshot_ == nullptr) snapshot_ = std::make_unique<Snapshot>(compute);
  snapshot_->take(save_->pieces);
  save_->taken = snapshot_->taken();
  for (const CheckpointPart& part : parts_) CutValues(*part.fsdp).keep_until(save_->taken);
}

std::optional<std::int64_t> Checkpointer::poll() {
  if (save_ == nullptr) return std::nullopt;
  const std::uint8_t is_done[] = {save_->job.is_done() ? std::uint8_t{1} : std::uint8_t{0}};
  const std::vector<std::uint8_t> all = comm::gather_to_host<std::uint8_t>(
      world_, is_done, meeting().memory, stream_, "checkpoint done");
  if (std::ranges::find(all, 0) != all.end()) return std::nullopt;
  return advance();
}

std::optional<std::int64_t> Checkpointer::wait() {
  std::optional<std::int64_t> step;
  while (save_ != nullptr) {
    {
      const auto pause = world_.pause_deadline();
      save_->job.wait();
    }
    step = advance();
  }
  return step;
}

// All ranks are done with the phase. Returns the step if that was the last.
std::optional<std::int64_t> Checkpointer::advance() {
  const std::int64_t step = save_->origin.step;
  std::vector<std::string> texts;
  try {
    texts = exchange(meeting(), save_->job.report(), fmt::format("checkpoint of step {}", step));
  } catch (...) {
    give_up();
    throw;
  }
  if (save_->phase == Save::Phase::kPublishing) {
    save_.reset();
    if (!texts.front().empty()) warn(texts.front());
    return step;
  }
  save_->phase = Save::Phase::kPublishing;
  save_->pieces.clear();
  save_->written = std::move(texts);
  const auto publish_it = [this, save = save_.get()]() -> std::string {
    if (folder_ == nullptr) return "";
    const auto pause = options_.async ? nullptr : world_.pause_deadline();
    return publish(*save);
  };
  save_->job.start(publish_it, options_.async && folder_ != nullptr);
  return std::nullopt;
}

// On rank 0. Returns what to warn of.
std::string Checkpointer::publish(const Save& save) {
  Manifest manifest = save.about;
  for (std::size_t rank = 0; rank < save.written.size(); ++rank) {
    manifest.add(parse_manifest(save.written[rank], fmt::format("what rank {} wrote", rank)));
  }
  manifest.check_complete(save.temporary);
  check_files(save.temporary, manifest);
  if (rejected_.contains(manifest.step)) {
    folder_->set_aside(manifest.step);
    rejected_.erase(manifest.step);
  }
  // Written now, when there is memory for it.
  std::string no_memory = fmt::format(
      "[checkpoint] expected memory to replace `latest` and remove old ones, got none (step {})",
      manifest.step);
  folder_->publish(save.temporary, manifest.step, to_text(manifest));
  // The checkpoint is there: what goes wrong now does not undo it.
  try {
    named_.insert(manifest.step);
    std::string warnings = folder_->set_latest(manifest.step);
    const auto add = [&warnings](const std::string& warning) {
      warnings += fmt::format("{}{}", warnings.empty() || warning.empty() ? "" : "\n  ", warning);
    };
    if (options_.keep == 0) return warnings;
    for (const std::int64_t step : steps_in(options_.folder)) add(reject_if_misnamed(step));
    for (const std::string& error : folder_->prune(options_.keep, rejected_)) add(error);
    // Of what is removed nothing is remembered: a run saves often, and its name may come again.
    const std::vector<std::int64_t> here = steps_in(options_.folder);
    std::erase_if(named_, [&](std::int64_t step) { return std::ranges::count(here, step) == 0; });
    return warnings;
  } catch (const std::bad_alloc&) {
    return no_memory;
  }
}

// Loading
// -----------------------------------------------------------------------------------------

std::optional<LoadedCheckpoint> Checkpointer::load_newest(const LoadOptions& options) {
  wait();
  std::optional<LoadedCheckpoint> loaded = load_newest_checkpoint(
      world_, parts_, options_.folder, options, [this](std::string_view text) { warn(text); },
      [this](std::int64_t step) { rejected_.insert(step); });
  if (loaded) run_ = loaded->run;
  return loaded;
}

LoadedCheckpoint Checkpointer::load(const std::string& path, const LoadOptions& options) {
  wait();
  check_is_newest(path, path);  // before anything is overwritten
  LoadedCheckpoint loaded = load_checkpoint(world_, parts_, path, options);
  for (const std::string& line : loaded.changed) warn(line);
  run_ = loaded.run;
  return loaded;
}

void Checkpointer::continue_from(const LoadedCheckpoint& loaded) {
  wait();
  check_is_newest(loaded.path, fmt::format("step {}", loaded.step));
  run_ = loaded.run;
}

// Collective: the newest checkpoint of the folder, as rank 0 sees it; nothing if there is none.
std::optional<std::int64_t> Checkpointer::newest_here() {
  const Report newest = report_of([&]() -> std::string {
    if (folder_ == nullptr) return "";
    for (const std::int64_t step : steps_in(options_.folder)) {
      if (!passes_over(step)) return std::to_string(step);
    }
    return "";
  });
  const std::string step = exchange(meeting(), newest, "newest checkpoint").front();
  return step.empty() ? std::nullopt : std::optional<std::int64_t>(std::stoll(step));
}

// Throws InvalidArgument unless it is, or the folder has none.
void Checkpointer::check_is_newest(const std::string& path, std::string_view name) {
  const std::optional<std::int64_t> here = newest_here();
  if (!here) return;
  std::error_code error;
  const bool is_newest =
      std::filesystem::equivalent(path, checkpoint_path(options_.folder, *here), error);
  require(is_newest,
          "[checkpoint] expected a folder for what follows {}, got one that has step {}: name "
          "another, or move its checkpoints ({})",
          name, *here, options_.folder);
}

void Checkpointer::check_is_new() {
  wait();
  const std::vector<std::int64_t> here = agreed_steps(meeting(), options_.folder);
  require(here.empty(),
          "[checkpoint] expected a folder without checkpoints for a new run, got one that has step "
          "{} ({})",
          here.empty() ? 0 : here.front(), options_.folder);
}

}  // namespace tessera::shard
