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
#include "engine/error.h"
#include "engine/io/json.h"
#include "engine/io/text.h"
#include "engine/memory.h"
#include "engine/tape.h"
#include "shard/fsdp.h"
#include "tools/cli/flags.h"
#include "tools/cli/main.h"
#include "tools/generate/eos_tokens.h"
#include "tools/generate/generator.h"
#include "tools/generate/memory_need.h"
#include "tools/generate/ordered_output.h"
#include "tools/generate/prompts.h"
#include "tools/io/jsonl.h"
#include "tools/launch/cpu_wishes.h"
#include "tools/models/family.h"
#include "tools/planning/require_memory.h"
#include "tools/tokenizer/tokenizer.h"
#include "tools/weights/adapter_files.h"
#include "tools/weights/model_files.h"

namespace tessera::tools {
namespace {

using engine::require;

struct Config {
  std::string from, adapter, prompt, prompts;
  std::int64_t tokens = 100, ranks = 1;
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
    flags.add("json", &json,
              {.help = "prints a JSON object in a line for each prompt: prompt, text, tokens, and "
                       "end, which is why the text ends (eos, tokens, positions)"});
  }
};

struct Prompt {
  std::string text;
  std::vector<std::int32_t> tokens;
};

std::vector<Prompt> read_prompts(const Config& config, std::vector<std::string> texts,
                                 const Tokenizer& tokenizer, const ModelConfig& model) {
  if (!config.prompts.empty()) texts = read_prompt_file(resolve_user_path(config.prompts));
  std::vector<Prompt> prompts;
  Encoder encoder(tokenizer);
  for (std::string& text : texts) {
    Prompt& prompt = prompts.emplace_back();
    prompt.text = std::move(text);
    encoder.encode(prompt.text, /*add_special_tokens=*/true, prompt.tokens);
    const std::int64_t count = std::ssize(prompt.tokens);
    require(count >= 1 && count <= model.seq,
            "[generate] expected a prompt of 1 to {} tokens, the positions of the model, got {} "
            "(prompt {}: {})",
            model.seq, count, prompts.size(), engine::excerpt(prompt.text, 60));
    const std::int32_t largest = std::ranges::max(prompt.tokens);
    require(largest < model.vocab,
            "[generate] expected a tokenizer of the model's {} tokens, got token {} (prompt {}: "
            "{})",
            model.vocab, largest, prompts.size(), engine::excerpt(prompt.text, 60));
  }
  return prompts;
}

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

/// What the prompts become: texts one after the other, or records.
class Writer {
 public:
  Writer(const Tokenizer& tokenizer, const std::vector<Prompt>& prompts, bool json)
      : tokenizer_(tokenizer),
        prompts_(prompts),
        json_(json),
        output_(prompts.size(),
                [is_terminal = ::isatty(STDOUT_FILENO) != 0](std::string_view text) {
                  const std::string safe = is_terminal ? without_commands(text) : std::string(text);
                  std::fwrite(safe.data(), 1, safe.size(), stdout);
                  return std::fflush(stdout) == 0;
                }) {}

  // Goes on with prompt `i`; `go_on` generates, and hands over tokens as they come. False when
  // nobody reads any more.
  template <class GoOn>
  bool write(std::size_t i, const GoOn& go_on) {
    StreamDecoder decoder(tokenizer_);
    std::string whole;
    // What a token is can depend on those before it: some begin with a space only there.
    for (const std::int32_t token : prompts_[i].tokens) decoder.next(token);
    const auto add = [&](const std::string& text) {
      if (json_) whole += text;
      return output_.add(i, json_ ? "" : text);
    };
    if (!json_ && prompts_.size() > 1) {
      output_.add(i, fmt::format("{}==> {} <==\n", i > 0 ? "\n" : "", i + 1));
    }
    const Continuation made = go_on([&](std::int32_t token) { return add(decoder.next(token)); });
    add(decoder.finish());
    return output_.end(i, json_ ? record(i, whole, made) : "\n");
  }

 private:
  std::string record(std::size_t i, const std::string& text, const Continuation& made) const {
    return JsonRecord()
        .add("prompt", std::string_view(prompts_[i].text))
        .add("text", std::string_view(text))
        .add_literal("tokens", fmt::format("[{}]", fmt::join(made.tokens, ",")))
        .add("end", name_of(made.end))
        .line();
  }

  const Tokenizer& tokenizer_;
  const std::vector<Prompt>& prompts_;
  bool json_;
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
  const std::vector<Prompt> prompts =
      read_prompts(config, std::move(words.prompts), tokenizer, model_config);
  const GenerateOptions options{.num_tokens = config.tokens,
                                .vocab = std::min(model_config.vocab, tokenizer.vocab_size()),
                                .eos = read_eos_tokens(from, tokenizer),
                                .sampling = config.sampling};
  Writer writer(tokenizer, prompts, config.json);
  // Nobody waits for others but while the model is read.
  const comm::ThreadsOptions patient{.deadline = std::chrono::hours(1)};
  const auto ranks = static_cast<int>(std::min<std::int64_t>(config.ranks, std::ssize(prompts)));
  std::size_t longest = 0;
  for (const Prompt& prompt : prompts) longest = std::max(longest, prompt.tokens.size());
  require_memory(generating_nbytes(model_config, ranks, static_cast<std::int64_t>(longest)),
                 fmt::format("the model on {} rank{}", ranks, ranks == 1 ? "" : "s"),
                 ranks == 1 ? "try a smaller model" : "try fewer --ranks, or a smaller model");
  comm::run_ranks(ranks, patient, [&](comm::ProcessGroup& world) {
    const engine::Memory memory;
    engine::Tape tape(memory, engine::Stream::inline_cpu("compute"));
    const auto model = model_config.make();
    // Their values are in files.
    for (engine::Parameter* p : parameters_of(*model)) p->init = engine::Init::zeros();
    shard::Fsdp fsdp(world, memory, tape.stream(), model->blocks(), model->root(),
                     {.placement = shard::Placement::preset("zero3")});
    load_model(fsdp, *model, from, delta ? &*delta : nullptr);
    fsdp.keep_gathered([&] {
      bool is_read = true;
      for (auto i = static_cast<std::size_t>(world.rank()); is_read && i < prompts.size();
           i += static_cast<std::size_t>(world.size())) {
        is_read = writer.write(i, [&](const auto& use) {
          Continuation made = generate(tape, *model, prompts[i].tokens, i, options, use);
          if (made.end == End::kPositions) {
            say_cut(i, std::ssize(made.tokens), options, prompts[i], model_config.seq);
          }
          return made;
        });
      }
    });
  });
}

}  // namespace
}  // namespace tessera::tools

int main(int argc, char** argv) {
  return tessera::tools::run_main([&] { tessera::tools::run(argc, argv); });
}
