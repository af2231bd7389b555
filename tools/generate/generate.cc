// Goes on with texts, by a model in a folder of Hugging Face.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/threads.h"
#include "engine/dtype.h"
#include "engine/error.h"
#include "engine/memory.h"
#include "engine/tape.h"
#include "shard/fsdp.h"
#include "tools/cli/flags.h"
#include "tools/cli/main.h"
#include "tools/decoding/generator.h"
#include "tools/decoding/prompts.h"
#include "tools/decoding/sampler.h"
#include "tools/generate/eos_tokens.h"
#include "tools/generate/memory_need.h"
#include "tools/generate/ordered_output.h"
#include "tools/generate/prompt_words.h"
#include "tools/launch/cpu_wishes.h"
#include "tools/models/family.h"
#include "tools/planning/require_memory.h"
#include "tools/tokenizer/tokenizer.h"
#include "tools/weights/adapter_files.h"
#include "tools/weights/model_files.h"

namespace tessera::tools {
namespace {

using engine::DType;
using engine::require;

struct Config {
  std::string from, adapter, prompt, prompts;
  std::int64_t tokens = 100, ranks = 1, batch = 8;
  DType param = DType::kF32;
  bool json = false;
  Sampling sampling;

  void add_to(FlagSet& flags) {
    flags.add("from", &from,
              {.help = "folder of a " + titles() +
                       " model of Hugging Face, with its tokenizer: config.json, safetensors, "
                       "tokenizer.json"});
    flags.add("adapter", &adapter,
              {.help = "folder of low-rank adapters in PEFT's layout, which are added to the "
                       "model's weights; empty: none"});
    flags.add("prompt", &prompt, {.help = "text to go on with; may be given several times"});
    flags.add("prompts", &prompts, {.help = "file of texts to go on with, one in each line"});
    flags.add(
        "tokens", &tokens,
        {.help = "tokens to generate for a prompt, unless its text ends before, by a token that "
                 "the model's files call eos, or the model has no more positions",
         .min = 1,
         .max = 1 << 24});
    flags.add("temperature", &sampling.temperature,
              {.help = "0 takes the likeliest token; 1 draws by the model's probabilities, less "
                       "makes likely tokens likelier, more makes all more alike",
               .min = 0,
               .max = 1e6});
    flags.add("top_k", &sampling.top_k,
              {.help = "draws from so many likeliest tokens alone; 0: from all",
               .min = 0,
               .max = 1 << 24});
    flags.add("top_p", &sampling.top_p,
              {.help = "draws from the likeliest tokens that have this probability together, and "
                       "from no more; after top_k",
               .min = 0,
               .max = 1,
               .above_min = true});
    flags.add("seed", &sampling.seed,
              {.help = "of what is drawn; the number of a prompt and the place in its text are the "
                       "rest, and the number of ranks has no part in it",
               .min = 0});
    flags.add("ranks", &ranks,
              {.help = "threads that share the prompts, at most one for each. Each gathers the "
                       "whole model, of which they "
                       "otherwise hold a part each",
               .min = 1,
               .max = 1024});
    flags.add("batch", &batch,
              {.help = "prompts that a rank goes on with together, a token of each in a forward; "
                       "1: one after the other, so that no other prompt has a part in the last "
                       "bits of a text's logits",
               .min = 1,
               .max = 1024});
    flags.add("precision.param", &param,
              EnumOption<DType>{"what the model is gathered and computed in, keys and values too; "
                                "each rank's own part of it stays f32",
                                {{"f32", DType::kF32}, {"bf16", DType::kBF16}}});
    flags.add("json", &json,
              {.help = "prints a JSON object in a line for each prompt: prompt, text, tokens, and "
                       "end, which is why the text ends (eos, tokens, positions)"});
  }
};

void check(const Config& config, const FlagSet& flags, const std::vector<std::string>& texts) {
  require(!config.from.empty(), "[generate] expected --from=FOLDER, got none (from)");
  require(texts.empty() == !config.prompts.empty(),
          "[generate] expected --prompt=TEXT or --prompts=FILE, got {} (prompt)",
          texts.empty() ? "neither" : "both");
  for (const char* flag : {"top_k", "top_p", "seed"}) {
    require(config.sampling.temperature > 0 || !flags.is_given(flag),
            "[generate] expected no --{} with a temperature of 0, which draws nothing, got it ({})",
            flag, flag);
  }
}

/// What the prompts become: texts one after the other, or records. Each text is written by one
/// thread.
class Writer {
 public:
  Writer(const Tokenizer& tokenizer, const std::vector<Prompt>& prompts, bool json)
      : tokenizer_(tokenizer),
        prompts_(prompts),
        json_(json),
        decoders_(prompts.size()),
        output_(prompts.size(),
                [is_terminal = ::isatty(STDOUT_FILENO) != 0](std::string_view text) {
                  const std::string safe = is_terminal ? without_commands(text) : std::string(text);
                  std::fwrite(safe.data(), 1, safe.size(), stdout);
                  return std::fflush(stdout) == 0;
                }) {}

  // Text `i` goes on with `token`. False when nobody reads any more.
  bool add(std::size_t i, std::int32_t token) {
    return output_.add(i, json_ ? "" : decoder(i).next(token));
  }
  void end(std::size_t i, const Continuation& made) {
    if (json_) {
      output_.end(i, record_of(prompts_[i], text_of(prompts_[i], made, &tokenizer_), made).line());
    } else {
      output_.end(i, decoder(i).finish() + "\n");
    }
  }

 private:
  StreamDecoder& decoder(std::size_t i) {
    std::optional<StreamDecoder>& decoder = decoders_[i];
    if (!decoder) {
      if (prompts_.size() > 1)
        output_.add(i, fmt::format("{}==> {} <==\n", i > 0 ? "\n" : "", i + 1));
      decoder.emplace(tokenizer_);
      // What a token is can depend on those before it: some begin with a space only there.
      for (const std::int32_t token : prompts_[i].tokens) decoder->next(token);
    }
    return *decoder;
  }

  const Tokenizer& tokenizer_;
  const std::vector<Prompt>& prompts_;
  bool json_;
  std::vector<std::optional<StreamDecoder>> decoders_;
  OrderedOutput output_;
};

void say_cut(std::size_t i, std::int64_t count, const GenerateOptions& options,
             const Prompt& prompt, std::int64_t positions) {
  fmt::print(stderr,
             "warning: prompt {} has {} of {} tokens, as the model has {} positions, of which the "
             "prompt takes {}\n",
             i + 1, count, options.num_tokens, positions, prompt.tokens.size());
}

void run(int argc, char** argv) {
  FlagSet flags("generate",
                "Goes on with texts, by a model of Hugging Face: generate --from=FOLDER "
                "--prompt=TEXT. Prints what follows each prompt, as it comes.");
  Config config;
  config.add_to(flags);
  PromptWords words = read_prompt_words(std::span(argv, static_cast<std::size_t>(argc)).subspan(1));
  if (!flags.parse(words.others, std::cout)) return;
  if (words.prompts.empty() && !config.prompt.empty()) words.prompts = {config.prompt};
  check(config, flags, words.prompts);
  choose_cpu_by_environment();
  const std::string from = resolve_user_path(config.from);
  const ModelConfig model_config = read_model_config(from);
  std::optional<LoraDelta> delta;
  if (!config.adapter.empty()) delta.emplace(resolve_user_path(config.adapter), model_config);
  const Tokenizer tokenizer = Tokenizer::read(from);
  if (!config.prompts.empty()) words.prompts = read_prompt_file(resolve_user_path(config.prompts));
  const std::vector<Prompt> prompts = prompts_of(
      std::move(words.prompts),
      {.tokenizer = &tokenizer, .positions = model_config.seq, .vocab = model_config.vocab});
  const GenerateOptions options{.num_tokens = config.tokens,
                                .vocab = std::min(model_config.vocab, tokenizer.vocab_size()),
                                .eos = read_eos_tokens(from, tokenizer),
                                .batch = config.batch};
  Writer writer(tokenizer, prompts, config.json);
  // Nobody waits for others but while the model is read.
  const comm::ThreadsOptions patient{.deadline = std::chrono::hours(1)};
  const auto ranks = static_cast<int>(std::min<std::int64_t>(config.ranks, std::ssize(prompts)));
  std::size_t longest = 0;
  for (const Prompt& prompt : prompts) longest = std::max(longest, prompt.tokens.size());
  const auto num_tokens = static_cast<std::int64_t>(longest);
  const std::int64_t of_first_rank = (std::ssize(prompts) + ranks - 1) / ranks;
  const GeneratingNeed need{.num_ranks = ranks,
                            .num_tokens = num_tokens,
                            .num_kept = std::min(num_tokens + config.tokens - 1, model_config.seq),
                            .num_texts = std::min(config.batch, of_first_rank),
                            .param = config.param};
  require_memory(generating_nbytes(model_config, need),
                 fmt::format("the model on {} rank{}", ranks, ranks == 1 ? "" : "s"),
                 ranks == 1 ? "try a smaller model" : "try fewer --ranks, or a smaller model");
  comm::run_ranks(ranks, patient, [&](comm::ProcessGroup& world) {
    const engine::Memory memory;
    engine::Tape tape(memory, engine::Stream::inline_cpu("compute"));
    const auto model = model_config.make();
    // Their values are in files.
    for (engine::Parameter* p : parameters_of(*model)) p->init = engine::Init::zeros();
    shard::Fsdp fsdp(
        world, memory, tape.stream(), model->blocks(), model->root(),
        {.placement = shard::Placement::preset("zero3"), .precision = {.param = config.param}});
    load_model(fsdp, *model, from, delta ? &*delta : nullptr);
    std::vector<std::size_t> mine;
    std::vector<TextRequest> requests;
    for (auto i = static_cast<std::size_t>(world.rank()); i < prompts.size();
         i += static_cast<std::size_t>(world.size())) {
      mine.push_back(i);
      requests.push_back(
          {.prompt = prompts[i].tokens,
           .next = [sampler = Sampler(config.sampling, i)](
                       std::span<const float> logits,
                       std::int64_t place) mutable { return sampler.next(logits, place); },
           .use = [&writer, i](std::int32_t token) { return writer.add(i, token); }});
    }
    fsdp.keep_gathered([&] {
      generate(tape, *model, requests, options, [&](std::size_t text, const Continuation& made) {
        const std::size_t i = mine[text];
        writer.end(i, made);
        if (made.end != End::kPositions) return;
        say_cut(i, std::ssize(made.tokens), options, prompts[i], model_config.seq);
      });
    });
  });
}

}  // namespace
}  // namespace tessera::tools

int main(int argc, char** argv) {
  return tessera::tools::run_main([&] { tessera::tools::run(argc, argv); });
}
