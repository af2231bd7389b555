// Trains a GPT-2-shaped transformer, fully sharded over ranks that are threads of this process.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/error.h"
#include "tools/data/text_data.h"
#include "tools/io/gpt2_files.h"
#include "tools/io/text.h"
#include "tools/models/gpt.h"
#include "tools/models/gpt_checkpoint.h"
#include "tools/train/main.h"
#include "tools/train/ranks.h"
#include "tools/train/run_files.h"
#include "tools/train/stop.h"
#include "tools/train/trainer.h"

namespace tessera::tools {
namespace {

using engine::require;
using engine::Tensor;

struct ModelFlags {
  std::string preset = "small";
  // 0: as the preset, or the model that init.from names, says.
  std::int64_t layers = 0, heads = 0, dim = 0, seq = 0, vocab = 0;
  double dropout = 0;
};

struct Config : TrainConfig {
  ModelFlags model;
  std::string init_from, save_final;
  std::string data_path;
  SampleOrder data_order = SampleOrder::kShuffle;
  double val_fraction = 0.005;
  std::int64_t sample_tokens = 300;

  Config() {
    train.steps = 700;
    train.batch = 6;
    train.lr = 4e-3;
    train.warmup = 20;
    log.every = 50;
    log.val_every = 200;
    out = "runs/train_transformer";
  }

  void add_to(FlagSet& flags) {
    flags.add("model.preset", &model.preset,
              {.help = "sizes of the model", .choices = gpt_preset_names()});
    const auto size = [&](const char* name, std::int64_t* field, const char* help) {
      flags.add(name, field,
                {.help = std::string(help) + "; 0: as model.preset or init.from says",
                 .min = 0,
                 .max = 1 << 24});
    };
    size("model.layers", &model.layers, "transformer blocks");
    size("model.heads", &model.heads, "attention heads; divide model.dim");
    size("model.dim", &model.dim, "width");
    size("model.seq", &model.seq, "tokens of a sequence");
    size("model.vocab", &model.vocab, "tokens of the vocabulary");
    flags.add(
        "model.dropout", &model.dropout,
        {.help = "of embeddings and residual branches", .min = 0, .max = 1, .below_max = true});
    flags.add(
        "init.from", &init_from,
        {.help = "folder of a Hugging Face GPT-2 model to start from: sizes and weights, no more"});
    flags.add("save.final", &save_final,
              {.help = "folder to save the trained model to, in the Hugging Face GPT-2 layout"});
    flags.add(
        "data.path", &data_path,
        {.help = "text file (bytes are tokens) or .bin token file of llm.c or nanoGPT; empty: "
                 "the King James Bible"});
    flags.add("data.order", &data_order,
              EnumOption<SampleOrder>{
                  "of training sequences",
                  {{"shuffle", SampleOrder::kShuffle}, {"sequential", SampleOrder::kSequential}}});
    flags.add("data.val_fraction", &val_fraction,
              {.help = "part of the sequences, at the end, kept for validation; 0: none",
               .min = 0,
               .max = 1,
               .below_max = true});
    flags.add("sample.tokens", &sample_tokens,
              {.help = "tokens to generate at the end; 0: none", .min = 0, .max = 1 << 20});
    TrainConfig::add_to(flags);
  }
};

constexpr const char* kDefaultText = "third_party/data/kjv.txt";
constexpr const char* kHowToGetText =
    "give --data.path=FILE: any text, such as Debian's bible-kjv and bible-kjv-text write with "
    "`bible -f Gen1:1-Rev22:21 > kjv.txt`";

// The model's sizes: the preset, overridden by flags, or those of the folder to start from, which
// flags must fit: the same, and sequences that are no longer than its positions.
GptConfig model_config(const Config& config) {
  const ModelFlags& flags = config.model;
  const bool from_file = !config.init_from.empty();
  require(!from_file || flags.preset == ModelFlags().preset,
          "[init.from] expected sizes from {} alone, got model.preset={} as well", config.init_from,
          flags.preset);
  GptConfig model =
      from_file ? read_gpt_config(resolve_user_path(config.init_from)) : gpt_preset(flags.preset);
  const auto apply = [&](const char* name, std::int64_t flag, std::int64_t& field) {
    if (flag == 0) return;
    require(!from_file || flag == field, "[init.from] expected model.{} of {} as in {}, got {}",
            name, field, config.init_from, flag);
    field = flag;
  };
  apply("layers", flags.layers, model.layers);
  apply("heads", flags.heads, model.heads);
  apply("dim", flags.dim, model.dim);
  apply("vocab", flags.vocab, model.vocab);
  if (from_file) {
    require(flags.seq <= model.seq, "[init.from] expected model.seq of at most {} as in {}, got {}",
            model.seq, config.init_from, flags.seq);
  } else {
    apply("seq", flags.seq, model.seq);
  }
  model.dropout = flags.dropout;
  model.validate();
  return model;
}

// Samples at temperature 0.8 from the 40 likeliest tokens; all ranks draw the same. Collective.
std::vector<std::int32_t> generate(Trainer& trainer, Gpt& gpt, std::vector<std::int32_t> tokens,
                                   std::int64_t num_tokens, std::uint64_t seed) {
  constexpr float kTemperature = 0.8f;
  constexpr std::size_t kTopK = 40;
  const engine::RandomStream random{seed, engine::fnv1a("sample")};
  constexpr std::int64_t kTokensPerLook = 16;
  for (std::int64_t i = 0; i < num_tokens; ++i) {
    if (i % kTokensPerLook == 0 && trainer.stops()) break;
    const auto context = std::min(static_cast<std::int64_t>(tokens.size()), gpt.config().seq);
    const Tensor input = Tensor::from<std::int32_t>(
        trainer.tape().memory(), {1, context},
        std::span<const std::int32_t>(tokens).last(static_cast<std::size_t>(context)), "tokens");
    const Tensor logits = gpt.next_token_logits(trainer.tape(), input);
    const std::vector<float> scores = to_floats(logits);
    trainer.world().check();
    std::vector<std::int32_t> order(scores.size());
    std::iota(order.begin(), order.end(), 0);
    const std::size_t k = std::min(kTopK, order.size());
    std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(k), order.end(),
                      [&](std::int32_t a, std::int32_t b) {
                        const float sa = scores[static_cast<std::size_t>(a)];
                        const float sb = scores[static_cast<std::size_t>(b)];
                        return sa != sb ? sa > sb : a < b;
                      });
    std::vector<double> weights(k);
    const float top = scores[static_cast<std::size_t>(order[0])];
    for (std::size_t j = 0; j < k; ++j) {
      weights[j] = std::exp((scores[static_cast<std::size_t>(order[j])] - top) / kTemperature);
    }
    double pick = random.uniform(static_cast<std::uint64_t>(i)) *
                  std::accumulate(weights.begin(), weights.end(), 0.0);
    std::size_t chosen = 0;
    while (chosen + 1 < k && pick >= weights[chosen]) pick -= weights[chosen++];
    tokens.push_back(order[chosen]);
  }
  return tokens;
}

// Bytes a terminal can show.
std::string printable(const std::vector<std::int32_t>& tokens) {
  std::string text;
  for (const std::int32_t token : tokens) {
    const bool shows = token == '\n' || (token >= 32 && token < 127);
    text += shows ? static_cast<char>(token) : '?';
  }
  return text;
}

struct Result {
  std::string params_sha256;
  std::optional<double> val_loss;
  JsonRecord end;
  std::vector<std::int32_t> sample;
};

Result train_rank(comm::ProcessGroup& world, const Ranks& ranks, const Config& config,
                  const GptConfig& model, const TokenDataset& data, RunLog* log) {
  Gpt gpt(model);
  Trainer trainer(world, ranks.compute(world.rank()), config, gpt.blocks(), gpt.root(), log);
  if (!config.init_from.empty()) load_gpt(trainer.fsdp(), resolve_user_path(config.init_from));
  if (log != nullptr) {
    log->say(fmt::format("plan {:016x}: {} units, {} over {} ranks", trainer.fsdp().plan_hash(),
                         trainer.fsdp().units().size(), config.parallel.strategy, world.size()));
  }
  engine::Tape& tape = trainer.tape();
  const std::int64_t batch = config.train.batch;
  const auto batch_of = [&](std::int64_t n) -> std::vector<BatchTensor> {
    const engine::Shape shape{n, data.seq()};
    return {{"tokens", shape, engine::DType::kI32}, {"targets", shape, engine::DType::kI32}};
  };
  const auto fill = [&](std::int64_t first, const Batch& host) {
    data.batch(first, batch, host[0].span<std::int32_t>(), host[1].span<std::int32_t>());
  };
  const auto train_loss = [&](std::int64_t first, const Batch& on_device) {
    return gpt.loss(tape, on_device[0], on_device[1],
                    {.recompute = config.train.recompute,
                     .seed = static_cast<std::uint64_t>(config.train.seed),
                     .first_sample = first});
  };
  // All sequences in batches of one size, so that every loss is a mean over as many tokens.
  const std::int64_t num_val = data.num_val_sequences();
  const std::int64_t val_batch = largest_divisor(num_val, batch);
  const auto validate = [&] {
    const double loss = trainer.mean_loss(num_val / val_batch, [&](std::int64_t b) {
      const Batch sequences =
          load_batch(tape.memory(), batch_of(val_batch), [&](const Batch& host) {
            data.val_batch(b * val_batch, val_batch, host[0].span<std::int32_t>(),
                           host[1].span<std::int32_t>());
          });
      return gpt.loss(tape, sequences[0], sequences[1], {.training = false});
    });
    const bool bytes = data.file().format() == "text";
    return Trainer::Validation{
        loss, bytes ? fmt::format(" ({:.3f} bits per byte)", loss / std::log(2.0)) : ""};
  };
  world.barrier("loaded");  // only now can no rank fail to start
  if (log != nullptr) {
    const auto pause = world.pause_deadline();
    log->begin();
  }
  trainer.run({batch_of(batch), fill}, train_loss,
              num_val > 0 ? Trainer::Validate(validate) : nullptr, data.seq());

  Result result{.params_sha256 = trainer.params_sha256(),
                .val_loss = trainer.val_loss(),
                .end = {},
                .sample = {}};
  if (!config.save_final.empty()) {
    save_gpt(trainer.fsdp(), model, resolve_user_path(config.save_final), world);
  }
  if (config.sample_tokens > 0 && trainer.stopped_by() == 0) {
    std::vector<std::int32_t> prompt(1);
    data.file().read(0, model.vocab, prompt);
    result.sample = generate(trainer, gpt, prompt, config.sample_tokens,
                             static_cast<std::uint64_t>(config.train.seed));
    if (trainer.stopped_by() != 0 && log != nullptr) {
      log->say(fmt::format("stopped by {} while sampling", signal_name(trainer.stopped_by())));
    }
  }
  result.end = trainer.end_record();
  return result;
}

// No output may be an input. But a model may be saved to the folder it came from: by then it was
// read, and its files are replaced.
void check_files(const Config& config, const FlagSet& flags, const std::string& data_path) {
  constexpr std::string_view kModelFiles[] = {"/config.json", ".safetensors",
                                              ".safetensors.index.json"};
  const RunFile data{"data.path", data_path};
  const std::vector<RunFile> model =
      config.init_from.empty()
          ? std::vector<RunFile>()
          : files_of("init.from", resolve_user_path(config.init_from), kModelFiles);
  RunLog::check_outputs(config, flags, std::span(&data, 1));
  RunLog::check_outputs(config, flags, model);
  if (config.save_final.empty()) return;
  const std::string folder = resolve_user_path(config.save_final);
  const std::vector<RunFile> saved{{"save.final", folder + "/config.json"},
                                   {"save.final", folder + "/" + kGpt2ReplacedConfig},
                                   {"save.final", folder + "/model.safetensors"}};
  check_files_differ(saved, std::span(&data, 1));
  check_files_differ(saved, RunLog::outputs(config));
  const RunFile given{"config", flags.config_path()};
  if (!given.path.empty()) check_files_differ(saved, std::span(&given, 1));
}

void run(int argc, char** argv) {
  Config config;
  FlagSet flags("train_transformer",
                "Trains a GPT-2-shaped transformer, fully sharded over ranks that are threads.");
  config.add_to(flags);
  if (!flags.parse(argc, argv, std::cout)) return;
  config.validate(flags);
  const Ranks ranks = Ranks::choose(config);
  const GptConfig model = model_config(config);
  const std::string path = data_path(config.data_path, kDefaultText, kHowToGetText);
  const std::int64_t seq = config.model.seq == 0 ? model.seq : config.model.seq;
  const TokenDataset data(TokenFile(path), {.seq = seq,
                                            .vocab = model.vocab,
                                            .val_fraction = config.val_fraction,
                                            .order = config.data_order,
                                            .seed = static_cast<std::uint64_t>(config.train.seed)});
  check_files(config, flags, path);
  if (!config.save_final.empty()) check_can_save_gpt(resolve_user_path(config.save_final));
  std::optional<StopSignals> signals;  // from the start of the ranks to the very end
  RunLog log(config, "tokens", flags.to_toml());
  if (config.sample_tokens > 0) {
    AtomicFile(log.folder() + "/sample.txt");  // or throws, before training
  }
  log.say(fmt::format(
      "model: {} layers x {}, {} heads, {:.2f}M parameters; data: {}, {} sequences of {}",
      model.layers, model.dim, model.heads, double(model.num_parameters()) * 1e-6, escaped(path),
      data.num_sequences(), seq));
  log.say("device: " + ranks.str());

  Result result;
  signals.emplace();
  ranks.run(config, [&](comm::ProcessGroup& world) {
    const bool is_first = world.rank() == 0;
    const Result mine = train_rank(world, ranks, config, model, data, is_first ? &log : nullptr);
    if (is_first) result = mine;
  });

  std::string sample_text;
  if (!result.sample.empty()) {
    const bool bytes = data.file().format() == "text";
    const std::string text = bytes ? printable(result.sample)
                                   : fmt::format("token ids: {}", fmt::join(result.sample, " "));
    log.say(fmt::format(
        "\n---- generated -----------------------------------------------------------\n{}\n"
        "--------------------------------------------------------------------------\n",
        text));
    sample_text = text + "\n";
  }
  log.say(fmt::format("parameters sha256 {}\nlog {}\nfiles in {}", result.params_sha256,
                      escaped(log.jsonl_path()), escaped(log.folder())));
  if (!config.save_final.empty()) {
    log.say(fmt::format("model in {}", escaped(resolve_user_path(config.save_final))));
  } else if (stop_requested() != 0) {
    log.say("no model saved (save.final is empty)");
  }
  log.finish(result.params_sha256, result.val_loss, ranks.record().add_all(result.end));
  if (!sample_text.empty()) log.write_file("sample.txt", sample_text);
}

}  // namespace
}  // namespace tessera::tools

int main(int argc, char** argv) {
  return tessera::tools::run_main([&] { tessera::tools::run(argc, argv); });
}
