// A checkpoint to a model folder of Hugging Face, and the other way round: which it is, is seen.
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/threads.h"
#include "engine/error.h"
#include "engine/io/text.h"
#include "engine/memory.h"
#include "shard/checkpoint/checkpointer.h"
#include "shard/checkpoint/reader.h"
#include "tools/cli/flags.h"
#include "tools/cli/main.h"
#include "tools/convert/newest_checkpoint.h"
#include "tools/huggingface/adapter_files.h"
#include "tools/huggingface/kept_files.h"
#include "tools/huggingface/model_writer.h"
#include "tools/models/family.h"
#include "tools/planning/require_memory.h"
#include "tools/weights/adapter_files.h"
#include "tools/weights/model_files.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using engine::require;

/// Says how far it is: on a terminal as it goes on, otherwise at the end alone.
class Progress {
 public:
  explicit Progress(std::string what, std::int64_t total) : what_(std::move(what)), total_(total) {}

  void done(std::int64_t nbytes) {
    done_ += nbytes;
    if (::isatty(STDERR_FILENO) == 0) return;
    fmt::print(stderr, "\r{} {:3.0f} %", what_,
               100.0 * static_cast<double>(done_) /
                   static_cast<double>(std::max<std::int64_t>(total_, 1)));
    if (done_ == total_) fmt::print(stderr, "\n");
  }

 private:
  std::string what_;
  std::int64_t total_, done_ = 0;
};

// fn(), which reads a checkpoint: its errors are of that, and not of what is written.
template <class F>
auto reading(const F& fn) {
  try {
    return fn();
  } catch (const IoError& e) {
    throw DamagedCheckpoint(e.what());
  }
}

// A checkpoint that was opened, and the model that it is of.
struct Checkpoint {
  explicit Checkpoint(const std::string& from) {
    reader = reading([&] { return std::make_unique<shard::CheckpointReader>(from); });
    reading([&] {
      for (std::size_t f = 0; f < reader->manifest().files.size(); ++f) reader->check_header(f);
    });
    const auto& values = reader->manifest().values;
    const auto text = values.find("model");
    config = parse_model_text(text == values.end() ? "{}" : text->second, from);
    model = config.make();
    for (const engine::Parameter* p : parameters_of(*model)) {
      const shard::CheckpointTensor* const t = reader->find("parameter", p->name);
      require<IoError>(t != nullptr && t->numel() == p->shape.numel(),
                       "[convert] expected a parameter of shape {}, got {} ({}, {})", p->shape,
                       t == nullptr ? "none" : "another", p->name, from);
    }
  }
  void read(const engine::Parameter& p, std::span<float> values) const {
    reading([&] { reader->read(*reader->find("parameter", p.name), 0, values); });
  }

  std::unique_ptr<shard::CheckpointReader> reader;
  ModelConfig config;
  std::unique_ptr<LanguageModel> model;
};

void check_base(const ModelConfig& config, const std::string& base, const std::string& from) {
  ModelConfig whole = config;
  whole.lora = {};
  require<IoError>(
      base.empty() || to_text(read_model_config(base)) == to_text(whole),
      "[convert] expected the model of the checkpoint in base, {}, got another ({}, {})",
      to_text(whole), base, from);
}

// The model that others begin with stays as it is. An empty `base` is no folder.
void check_is_not_base(const std::string& to, const std::string& base) {
  std::error_code ignored;
  require(!std::filesystem::equivalent(to, base, ignored),
          "[convert] expected another folder than the model's own, which stays as it is, got {} "
          "(to)",
          to);
}

// One parameter at a time. Of a model with adapters what they add is added.
void to_model(const Checkpoint& checkpoint, const std::string& to, const SaveOptions& options) {
  const auto read = [&](const engine::Parameter& p, std::span<float> values) {
    checkpoint.read(p, values);
  };
  std::optional<LoraDelta> delta;
  if (checkpoint.config.lora.is_on())
    delta.emplace(*checkpoint.model, checkpoint.config.lora, read);
  ModelConfig whole = checkpoint.config;
  whole.lora = {};
  const auto model = whole.make();
  std::vector<engine::Parameter*> parameters = parameters_of(*model);
  std::ranges::sort(parameters, {}, [](const engine::Parameter* p) { return p->name; });
  Progress progress("parameters", whole.num_parameters());
  const std::unique_ptr<ModelWriter> writer = model_writer(*model, to, parameters, options);
  for (const engine::Parameter* p : parameters) {
    std::vector<float> values(static_cast<std::size_t>(p->shape.numel()));
    read(*p, values);
    if (delta) add_delta(*delta, *model, *p, values);
    write_parameter(*writer, *model, *p, values);
    progress.done(std::ssize(values));
  }
  writer->finish();
}

void from_checkpoint(const std::string& from, const std::string& to, const SaveOptions& options,
                     const std::string& base, bool merge, bool gives_shards) {
  const Checkpoint checkpoint(from);
  check_base(checkpoint.config, base, from);
  const bool has_adapters = checkpoint.config.lora.is_on();
  require(has_adapters || !merge,
          "[convert] expected a checkpoint with adapters to merge, got one without (merge, {})",
          from);
  const bool are_adapters = has_adapters && !merge;
  if (are_adapters) {
    require(!gives_shards,
            "[convert] expected a model with --shard_gib, or --merge, got adapters, which are in "
            "one file (shard_gib, {})",
            from);
    require(!base.empty(),
            "[convert] expected --base with adapters, the model that they are for, or --merge, got "
            "neither (base, {})",
            from);
    write_adapters(
        *checkpoint.model, checkpoint.config.lora, to, base,
        [&](const engine::Parameter& p, std::span<float> values) { checkpoint.read(p, values); });
  } else {
    to_model(checkpoint, to, options);
  }
  fmt::print("{} of step {} in {}\n", are_adapters ? "adapters" : "model",
             checkpoint.reader->manifest().step, engine::escaped(to));
}

// Adapters, added to the weights of the model `base`; empty: that which they name.
void merge_adapters(const std::string& from, const std::string& to, std::string base,
                    double shard_gib) {
  if (base.empty()) base = read_adapter_config(from).base;
  require<IoError>(!base.empty(),
                   "[convert] expected --base, as adapter_config.json names no model, got none "
                   "(base, {})",
                   from);
  check_is_not_base(to, base);
  const ModelConfig config = read_model_config(base);
  const auto model = config.make();
  Progress progress("parameters", config.num_parameters());
  merge_model(*model, base, LoraDelta(from, config), to,
              {.shard_nbytes = shard_nbytes_of(shard_gib), .kept = read_kept_files(base)},
              [&](std::int64_t numel) { progress.done(numel); });
  fmt::print("model in {}: {} with the adapters of {}\n", engine::escaped(to),
             engine::escaped(base), engine::escaped(from));
}

// Through one rank, which holds the whole model.
void to_checkpoint(const std::string& from, const std::string& to) {
  const ModelConfig config = read_model_config(from);
  const std::unique_ptr<LanguageModel> model = config.make();
  std::int64_t nbytes = 0;
  for (const engine::Parameter* p : parameters_of(*model)) nbytes += 4 * p->shape.numel();
  require_memory(nbytes, "the whole model in f32", "convert it where there is more");
  comm::run_ranks(1, {}, [&](comm::ProcessGroup& world) {
    const engine::Memory memory;
    shard::Fsdp fsdp(world, memory, engine::Stream::inline_cpu("compute"), model->blocks(),
                     model->root(), {.placement = shard::Placement::preset("ddp")});
    load_model(fsdp, *model, from);
    shard::Checkpointer checkpointer(world, {{&fsdp}}, {.folder = to, .async = false});
    checkpointer.check_is_new();
    checkpointer.save(0, {{"model", to_text(config)}, {"next_sample", "0"}, {"num_skips", "0"}});
  });
  fmt::print(
      "checkpoint of step 0 in {}; it has no optimizer: --resume={} --checkpoint.strict=false\n",
      engine::escaped(to), engine::escaped(to));
}

// What a folder is that has neither a model nor a checkpoint.
std::string found_instead(const std::string& folder) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(folder, ignored)) return "no folder";
  const std::string inside = folder + "/checkpoints";
  return has_checkpoint(inside) ? fmt::format("that of a run: give {}", inside) : "another";
}

void run(int argc, char** argv) {
  std::string from, to, base;
  double shard_gib = 46;
  bool merge = false;
  FlagSet flags("convert",
                "A checkpoint of train_transformer to a model folder as Hugging Face has them, or "
                "the other way round; low-rank adapters to a whole model.");
  flags.add(
      "from", &from,
      {.help = "folder: a checkpoint, one of checkpoints, of which the newest that verifies, or "
               "a " +
               titles() + " model of Hugging Face; with merge also adapters of PEFT"});
  flags.add("to", &to,
            {.help = "folder to write the result to, made if need be; not that of base"});
  flags.add("base", &base,
            {.help = "folder of the model that training began with: the files of its tokenizer, "
                     "and what its config.json says more, are kept; empty: none, or the model that "
                     "adapters name"});
  flags.add(
      "merge", &merge,
      {.help = "adds adapters, or those of a checkpoint, to the weights of their model; false: a "
               "checkpoint with adapters becomes adapters of PEFT"});
  flags.add("shard_gib", &shard_gib,
            {.help = "GiB of weights in a file of a model at most; a larger model is written in "
                     "shards with an index; 0: one file of any size",
             .min = 0,
             .max = 1 << 20});
  if (!flags.parse(argc, argv, std::cout)) return;
  require(!from.empty() && !to.empty(),
          "[convert] expected --from=FOLDER --to=FOLDER, got '{}', '{}'", from, to);
  from = resolve_user_path(from);
  to = resolve_user_path(to);
  require<IoError>(!has_checkpoint(to),
                   "[convert] expected a folder without checkpoints, got {} (to)", to);
  if (!base.empty()) base = resolve_user_path(base);
  if (has_checkpoint(from)) {
    check_is_not_base(to, base);
    const SaveOptions options{.shard_nbytes = shard_nbytes_of(shard_gib),
                              .kept = read_kept_files(base)};
    return read_newest(
        from,
        [&](const std::string& path) {
          from_checkpoint(path, to, options, base, merge, flags.is_given("shard_gib"));
        },
        [](std::string_view line) {
          fmt::print(stderr, "warning: {}\n", engine::escaped_lines(line));
        });
  }
  if (has_adapter_config(from)) {
    require(merge, "[convert] expected --merge of adapters, got none (merge, {})", from);
    return merge_adapters(from, to, base, shard_gib);
  }
  std::error_code ignored;
  require<IoError>(std::filesystem::exists(from + "/config.json", ignored),
                   "[convert] expected a folder with manifest.json, step_N or config.json, got {} "
                   "({})",
                   found_instead(from), from);
  for (const char* flag : {"base", "merge", "shard_gib"}) {
    require(!flags.is_given(flag), "[convert] expected a checkpoint with --{}, got a model ({})",
            flag, from);
  }
  require<IoError>(!std::filesystem::exists(to + "/config.json", ignored),
                   "[convert] expected a folder for a checkpoint, got one with a model ({})", to);
  to_checkpoint(from, to);
}

}  // namespace
}  // namespace tessera::tools

int main(int argc, char** argv) {
  return tessera::tools::run_main([&] { tessera::tools::run(argc, argv); });
}
