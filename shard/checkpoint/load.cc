#include "shard/checkpoint/load.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "engine/copy.h"
#include "engine/error.h"
#include "engine/io/late_files.h"
#include "engine/io/safetensors.h"
#include "engine/io/text.h"
#include "shard/checkpoint/agreement.h"
#include "shard/checkpoint/folder.h"
#include "shard/checkpoint/manifest.h"
#include "shard/checkpoint/reader.h"
#include "shard/cut_values.h"
#include "shard/hooks/hook.h"

namespace tessera::shard {

using engine::DType;
using engine::Parameter;
using engine::require;
using engine::Tensor;

namespace {

bool is_of_hook(const CheckpointTensor& t) {
  return t.kind != "parameter" && t.kind != "buffer" && t.kind != "ema" &&
         !t.kind.starts_with("optimizer.");
}

// What this rank's hooks make of what hooks remembered.
class HookNeeds {
 public:
  void add(const Fsdp& fsdp) {
    has_state_ = has_state_ || have_hooks_state(fsdp);
    for (const auto& unit : fsdp.units()) {
      const auto* const hook = dynamic_cast<const HookReducer*>(unit->reducer());
      if (hook != nullptr) hooks_.push_back(hook);
    }
  }
  bool has_state() const { return has_state_; }
  // What no hook knows is left to load(), which says more of it.
  bool takes(const CheckpointTensor& t) const {
    const HookTensorInfo info{.name = t.kind, .parameter = t.name};
    bool is_over = false;
    for (const HookReducer* hook : hooks_) {
      const std::optional<bool> takes = hook->takes(info);
      if (takes.value_or(false)) return true;
      is_over = is_over || takes.has_value();
    }
    return has_state_ && !is_over;
  }

 private:
  bool has_state_ = false;  // any of it
  std::vector<const HookReducer*> hooks_;
};

class HooksInFiles final : public HookState {
 public:
  explicit HooksInFiles(CheckpointReader& reader) : reader_(reader) {
    for (const CheckpointTensor& t : reader.manifest().tensors) {
      if (!is_of_hook(t)) continue;
      infos_.push_back({.name = t.kind,
                        .parameter = t.name,
                        .part = t.part,
                        .num_parts = t.num_parts,
                        .numel = t.numel()});
      tensors_.push_back(&t);
    }
  }
  std::span<const HookTensorInfo> tensors() const override { return infos_; }
  void read(std::size_t index, std::int64_t first, std::span<float> out) const override {
    reader_.read(*tensors_[index], first, out);
  }

 private:
  CheckpointReader& reader_;
  std::vector<HookTensorInfo> infos_;
  std::vector<const CheckpointTensor*> tensors_;
};

/// One rank's loading.
class Loading {
 public:
  Loading(CheckpointReader& reader, std::span<const CheckpointPart> parts, HookNeeds hooks,
          const LoadOptions& options)
      : reader_(reader), parts_(parts), hooks_(hooks), options_(options) {}

  /// What is needed and missing, or another; and which tensors are needed, by number.
  struct Needs {
    std::vector<std::string> fatal, missing;
    std::string needed;  // a letter each: y or n
  };
  Needs needs() const;
  void read_values();
  /// Returns LoadedCheckpoint::changed.
  std::vector<std::string> set_optimizers();

 private:
  const CheckpointTensor* need(Needs& needs, std::string_view kind, std::string_view name,
                               std::span<const std::int64_t> dims, bool is_fatal,
                               int part = 0) const;
  std::vector<Optimizer*> all_optimizers() const;
  static void compare_groups(Needs& needs, const Optimizer& optimizer,
                             const CheckpointOptimizer& of_file);
  bool has_state_of(const Optimizer& optimizer) const;
  void read_flat(const Flat& flat, const CheckpointPart& part);
  void read_into(const CheckpointTensor& t, std::int64_t begin, const Tensor& values);
  void read_buffers(const Fsdp& fsdp);
  void read_hooks();

  CheckpointReader& reader_;
  std::span<const CheckpointPart> parts_;
  HookNeeds hooks_;
  const LoadOptions& options_;
  std::vector<float> staging_;
};

int buffer_part(const Fsdp& fsdp) {
  return fsdp.options().broadcast_buffers ? 0 : fsdp.mesh().world().rank();
}

const CheckpointTensor* Loading::need(Needs& needs, std::string_view kind, std::string_view name,
                                      std::span<const std::int64_t> dims, bool is_fatal,
                                      int part) const {
  const CheckpointTensor* const t = reader_.find(kind, name, part);
  if (t == nullptr) {
    (is_fatal ? needs.fatal : needs.missing).push_back(fmt::format("missing: {} {}", kind, name));
    return nullptr;
  }
  const auto number = static_cast<std::size_t>(t - reader_.manifest().tensors.data());
  needs.needed[number] = 'y';
  if (!std::ranges::equal(t->shape, dims)) {
    needs.fatal.push_back(fmt::format("{} {}: expected shape {}, got {}", kind, name,
                                      engine::to_string(dims), engine::to_string(t->shape)));
  }
  return t;
}

Loading::Needs Loading::needs() const {
  Needs needs;
  const std::vector<CheckpointTensor>& tensors = reader_.manifest().tensors;
  needs.needed.assign(tensors.size(), 'n');
  for (const CheckpointPart& part : parts_) {
    const Fsdp* const fsdp = part.fsdp;
    for (const auto& unit : fsdp->units()) {
      for (const Flat& flat : unit->flats()) {
        for (const OwnedTensor& owned : owned_tensors(flat, part)) {
          for (const Parameter* p : flat.parameters) {
            if (p->shape.numel() == 0 || !owned.has(*p)) continue;
            const auto* t =
                need(needs, owned.kind, p->name, p->shape.dims(), owned.kind == "parameter");
            if (t == nullptr || t->dtype == DType::kF32 || t->dtype == DType::kBF16) continue;
            needs.fatal.push_back(fmt::format("{} {}: expected F32 or BF16, got {}", owned.kind,
                                              p->name, engine::safetensors_dtype(t->dtype)));
          }
        }
      }
    }
    for (const Tensor& buffer : fsdp->buffers()) {
      const auto* t =
          need(needs, "buffer", buffer.name(), buffer.shape().dims(), true, buffer_part(*fsdp));
      if (t == nullptr) continue;
      if (t->dtype != buffer.dtype()) {
        needs.fatal.push_back(fmt::format("buffer {}: expected {}, got {}", buffer.name(),
                                          engine::safetensors_dtype(buffer.dtype()),
                                          engine::safetensors_dtype(t->dtype)));
      }
      const int num_parts = fsdp->options().broadcast_buffers ? 1 : fsdp->mesh().world().size();
      if (t->num_parts == num_parts) continue;
      needs.fatal.push_back(fmt::format("buffer {}: expected one of each of {} ranks, got {}",
                                        buffer.name(), num_parts, t->num_parts));
    }
  }
  bool is_hook_there = false;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!is_of_hook(tensors[i])) continue;
    is_hook_there = true;
    if (hooks_.takes(tensors[i])) needs.needed[i] = 'y';
  }
  if (hooks_.has_state() && !is_hook_there) {
    needs.missing.emplace_back("missing: what the hook remembers");
  }
  const std::vector<Optimizer*> optimizers = all_optimizers();
  if (optimizers.size() != reader_.manifest().optimizers.size()) {
    needs.fatal.push_back(fmt::format("optimizers: expected {}, got {}", optimizers.size(),
                                      reader_.manifest().optimizers.size()));
    return needs;
  }
  for (std::size_t i = 0; i < optimizers.size(); ++i) {
    if (options_.groups && optimizers[i] != nullptr) {
      compare_groups(needs, *optimizers[i], reader_.manifest().optimizers[i]);
    }
  }
  return needs;
}

// In the order of Manifest::optimizers; null for a part that has none.
std::vector<Optimizer*> Loading::all_optimizers() const {
  std::vector<Optimizer*> all;
  for (const CheckpointPart& part : parts_) {
    all.insert(all.end(), part.optimizers.begin(), part.optimizers.end());
    if (part.optimizers.empty()) all.push_back(nullptr);
  }
  return all;
}

void Loading::compare_groups(Needs& needs, const Optimizer& optimizer,
                             const CheckpointOptimizer& of_file) {
  std::set<std::string> mine, saved;
  for (const ParameterGroup& g : optimizer.groups()) mine.insert(g.name);
  for (const CheckpointGroup& g : of_file.groups) saved.insert(g.name);
  for (const std::string& name : mine) {
    if (saved.contains(name)) continue;
    needs.missing.push_back(fmt::format("missing: parameter group {}", name));
  }
  for (const std::string& name : saved) {
    if (mine.contains(name)) continue;
    needs.missing.push_back(fmt::format("unexpected: parameter group {}", engine::excerpt(name)));
  }
}

void Loading::read_into(const CheckpointTensor& t, std::int64_t begin, const Tensor& values) {
  if (!values.defined() || values.numel() == 0) return;
  if (values.device().is_host() && values.dtype() == DType::kF32) {
    return reader_.read(t, begin, values.span<float>());
  }
  for (std::int64_t at = 0; at < values.numel(); at += kChunkNumel) {
    const std::int64_t n = std::min(kChunkNumel, values.numel() - at);
    staging_.resize(static_cast<std::size_t>(n));
    reader_.read(t, begin + at, staging_);
    engine::copy_from_floats(values.slice(at, {n}), staging_);
  }
}

void Loading::read_flat(const Flat& flat, const CheckpointPart& part) {
  for (const OwnedTensor& owned : owned_tensors(flat, part)) {
    for (const Segment& s : flat.segments) {
      const Parameter& p = *flat.parameters[s.parameter];
      const auto* t = owned.has(p) ? reader_.find(owned.kind, p.name) : nullptr;
      if (t == nullptr) continue;  // told already
      const SplitTensor values = owned.values.slice(s.shard_begin, s.numel);
      read_into(*t, s.parameter_begin, values.device());
      read_into(*t, s.parameter_begin + values.split(), values.host());
    }
  }
}

void Loading::read_buffers(const Fsdp& fsdp) {
  for (const Tensor& buffer : fsdp.buffers()) {
    const auto* t = reader_.find("buffer", buffer.name(), buffer_part(fsdp));
    const std::vector<std::byte> bytes = reader_.read_bytes(*t);
    buffer.copy_from_host(bytes.data(), buffer.numel());
  }
}

void Loading::read_hooks() {
  const HooksInFiles state(reader_);
  if (state.tensors().empty()) return;
  for (const CheckpointPart& part : parts_) load_hooks(*part.fsdp, state);
}

void Loading::read_values() {
  for (const CheckpointPart& part : parts_) {
    CutValues(*part.fsdp).settle();
    for (const auto& unit : part.fsdp->units()) {
      for (const Flat& flat : unit->flats()) read_flat(flat, part);
    }
    read_buffers(*part.fsdp);
  }
  if (hooks_.has_state()) read_hooks();
}

// Of any parameter, so that all ranks say the same.
bool Loading::has_state_of(const Optimizer& optimizer) const {
  for (const CheckpointPart& part : parts_) {
    if (std::ranges::find(part.optimizers, &optimizer) == part.optimizers.end()) continue;
    for (const Parameter* p : part.fsdp->parameters()) {
      if (!p->trainable || !optimizer.updates(*p)) continue;
      for (const std::string& name : optimizer.state_names()) {
        if (reader_.find(fmt::format("optimizer.{}", name), p->name) != nullptr) return true;
      }
    }
  }
  return optimizer.state_names().empty();
}

// Replaces `mine`, a setting of the program's, and says so if its value was another.
void take(double& mine, double saved, std::string_view key, const std::string& group,
          std::vector<std::string>& changed) {
  if (mine == saved) return;
  changed.push_back(fmt::format("parameter group '{}': {}={} of the checkpoint replaces {}",
                                engine::excerpt(group), key, saved, mine));
  mine = saved;
}

std::vector<std::string> Loading::set_optimizers() {
  std::vector<std::string> changed;
  const std::vector<Optimizer*> optimizers = all_optimizers();
  for (std::size_t i = 0; i < optimizers.size(); ++i) {
    Optimizer* const optimizer = optimizers[i];
    if (optimizer == nullptr) continue;
    const CheckpointOptimizer& saved = reader_.manifest().optimizers[i];
    // States that start from nothing count their steps from 0.
    if (has_state_of(*optimizer)) optimizer->set_num_steps(saved.num_steps);
    if (!options_.groups) continue;
    for (const CheckpointGroup& g : saved.groups) {
      if (std::ranges::find(optimizer->groups(), g.name, &ParameterGroup::name) ==
          optimizer->groups().end()) {
        continue;  // told already
      }
      ParameterGroup& mine = optimizer->group(g.name);
      take(mine.lr_scale, g.lr_scale, "lr_scale", g.name, changed);
      take(mine.weight_decay, g.weight_decay, "weight_decay", g.name, changed);
    }
  }
  return changed;
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += fmt::format("\n  {}", line);
  return text;
}

// Opens the checkpoint, as all ranks do, and throws on all unless it is the same for all. `ready`:
// whether this one got that far. `named`: as in load().
void open_alike(const Meeting& meeting, const Report& ready, const std::string& path,
                std::optional<std::int64_t> named, std::optional<CheckpointReader>& reader) {
  const bool is_first = meeting.world.rank() == 0;
  const auto open = [&] {
    reader.emplace(path);
    const std::int64_t step = reader->manifest().step;
    require<engine::IoError>(
        !named || *named == step,
        "[checkpoint] expected the step that the folder's name says, got another: {}",
        misnamed_text(path, step));
    return fmt::format("{:016x}", reader->manifest_xxh3());
  };
  Report own = ready;
  if (ready.kind == Report::Kind::kText) {
    own = report_of([&]() -> std::string {
      try {
        return open();
      } catch (const engine::IoError&) {
        if (is_first) throw;
        return "";  // rank 0's host may see what this one does not see yet
      }
    });
  }
  std::vector<std::string> opened = exchange(meeting, own, "checkpoint opened");
  const auto differ = [&] {
    return std::ranges::count(opened, opened.front()) < std::ssize(opened);
  };
  if (differ()) {
    own = report_of([&]() -> std::string {
      if (own.text == opened.front()) return own.text;
      const auto pause = meeting.world.pause_deadline();
      std::string text;
      std::exception_ptr error;
      engine::seen_late(fmt::format("{}/{}", path, kManifestName), [&] {
        try {
          error = nullptr;
          text = open();
        } catch (const engine::IoError&) {
          error = std::current_exception();
        }
        return error == nullptr && text == opened.front();
      });
      if (error != nullptr) std::rethrow_exception(error);
      return text;
    });
    opened = exchange(meeting, own, "checkpoint opened late");
  }
  require<engine::IoError>(
      !differ(),
      "[checkpoint] expected one checkpoint on all ranks, got manifests that differ ({})", path);
}

// `named`: the step that the folder's name says and the manifest must say too; none: any.
LoadedCheckpoint load(comm::ProcessGroup& world, std::span<const CheckpointPart> parts,
                      const std::string& path, const LoadOptions& options,
                      std::optional<std::int64_t> named) {
  require(!parts.empty(), "[checkpoint] expected something to load into ({})", path);
  const Fsdp& first = *parts.front().fsdp;
  const Meeting meeting{world, first.memory(), first.compute()};
  // Not below, where it would be told to ranks that wait for what has failed here.
  for (const CheckpointPart& part : parts) part.fsdp->synchronize();
  HookNeeds hooks;
  std::optional<CheckpointReader> reader;
  const Report ready = report_of([&]() -> std::string {
    for (const CheckpointPart& part : parts) {
      CutValues(*part.fsdp).check_at_rest("checkpoint");
      hooks.add(*part.fsdp);
    }
    return "";
  });
  open_alike(meeting, ready, path, named, reader);
  const Manifest& manifest = reader->manifest();
  Loading loading(*reader, parts, hooks, options);
  Loading::Needs needs;
  const Report looked_up = report_of([&] {
    needs = loading.needs();
    return needs.needed;
  });
  const std::vector<std::string> needed = exchange(meeting, looked_up, "checkpoint needed");
  for (std::size_t i = 0; i < manifest.tensors.size(); ++i) {
    const CheckpointTensor& t = manifest.tensors[i];
    const auto needs_it = [i](const std::string& of_rank) { return of_rank[i] == 'y'; };
    if (t.part > 0 || std::ranges::any_of(needed, needs_it)) continue;
    needs.missing.push_back(
        fmt::format("unexpected: {} {}", engine::excerpt(t.kind), engine::excerpt(t.name)));
  }
  const Report compared = report_of([&]() -> std::string {
    std::vector<std::string> all = needs.fatal;
    if (options.strict) all.insert(all.end(), needs.missing.begin(), needs.missing.end());
    require(all.empty(), "[checkpoint] expected the same tensors, got{}\n  ({})", joined(all),
            path);
    return "";
  });
  exchange(meeting, compared, "checkpoint compared");
  // A checkpoint that turns out to be damaged may have been read in part: that counts as written
  // too.
  for (const CheckpointPart& part : parts) {
    for (const auto& unit : part.fsdp->units()) CutValues(*part.fsdp).mark_stale(*unit);
  }
  std::vector<std::string> changed;
  const Report read = report_of([&]() -> std::string {
    for (std::size_t f = 0; f < manifest.files.size(); ++f) {
      if (static_cast<int>(f) % world.size() == world.rank()) reader->check_header(f);
    }
    const auto pause = world.pause_deadline();
    loading.read_values();
    changed = loading.set_optimizers();
    return "";
  });
  exchange(meeting, read, "checkpoint read");
  for (const CheckpointPart& part : parts) part.fsdp->parameters_changed();
  return {.path = path,
          .step = manifest.step,
          .run = manifest.run,
          .ranks = manifest.ranks,
          .values = manifest.values,
          .differences = std::move(needs.missing),
          .changed = std::move(changed)};
}

}  // namespace

LoadedCheckpoint load_checkpoint(comm::ProcessGroup& world, std::span<const CheckpointPart> parts,
                                 const std::string& path, const LoadOptions& options) {
  return load(world, parts, path, options, std::nullopt);
}

std::optional<LoadedCheckpoint> load_newest_checkpoint(
    comm::ProcessGroup& world, std::span<const CheckpointPart> parts, const std::string& folder,
    const LoadOptions& options, const std::function<void(std::string_view)>& warn,
    const std::function<void(std::int64_t step)>& rejected) {
  require(!parts.empty(), "[checkpoint] expected something to load into ({})", folder);
  const Fsdp& first = *parts.front().fsdp;
  std::string errors;
  for (const std::int64_t step : agreed_steps({world, first.memory(), first.compute()}, folder)) {
    const std::string path = checkpoint_path(folder, step);
    try {
      LoadedCheckpoint loaded = load(world, parts, path, options, step);
      for (const std::string& line : loaded.changed) {
        if (warn) warn(line);
      }
      return loaded;
    } catch (const engine::IoError& e) {
      errors += fmt::format("\n  {}", e.what());
      if (rejected) rejected(step);
      if (warn) warn(fmt::format("passed over, as it does not verify: {}", e.what()));
    }
  }
  require<engine::IoError>(errors.empty(),
                           "[checkpoint] expected a checkpoint that verifies, got none{}\n  ({})",
                           errors, folder);
  return std::nullopt;
}

}  // namespace tessera::shard
