// Texts to token ids: to read, or a file to train on.
#include <fmt/core.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/text.h"
#include "tools/cli/error_output.h"
#include "tools/cli/flags.h"
#include "tools/cli/main.h"
#include "tools/planning/require_memory.h"
#include "tools/tokenize/documents.h"
#include "tools/tokenize/token_writer.h"
#include "tools/tokenizer/tokenizer.h"

namespace tessera::tools {
namespace {

using engine::require;

struct Config {
  std::string tokenizer, out, field, prompt, end;
  bool special = true, documents = false;

  void add_to(FlagSet& flags) {
    flags.add("tokenizer", &tokenizer,
              {.help = "folder of a model with tokenizer.json, or with GPT-2's vocab.json and "
                       "merges.txt; or a tokenizer.json"});
    flags.add("out", &out,
              {.help = "file to write the tokens of all documents to, for --data.path of "
                       "train_transformer, called .bin; empty: prints them"});
    flags.add("field", &field,
              {.help = "key of the text in each line of the .jsonl files among the inputs"});
    flags.add("prompt", &prompt,
              {.help = "key of a text in each line that comes before that of --field and is not "
                       "learned; documents are kept apart as with --documents"});
    flags.add("documents", &documents,
              {.help = "keeps documents apart in the file: each is learned by itself, and not as a "
                       "part of one long text"});
    flags.add(
        "special", &special,
        {.help = "with the tokens that the tokenizer puts around a text, such as a first one"});
    flags.add("end", &end, {.help = "token to put after each document, such as <|endoftext|>"});
  }
};

// Flags, and what is none of them or of their values.
struct Words {
  std::vector<const char*> flags;
  std::vector<std::string> inputs;
};

Words read_words(std::span<const char* const> arguments) {
  Words words;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view word = arguments[i];
    if (!word.starts_with("--")) {
      words.inputs.push_back(resolve_user_path(word));
      continue;
    }
    words.flags.push_back(arguments[i]);
    const bool has_next_value = word == "--tokenizer" || word == "--out" || word == "--field" ||
                                word == "--prompt" || word == "--end" || word == "--config";
    if (has_next_value && i + 1 < arguments.size()) words.flags.push_back(arguments[++i]);
  }
  return words;
}

void check(const Config& config, const std::vector<std::string>& inputs) {
  require(!config.tokenizer.empty() && !inputs.empty(),
          "[tokenize] expected --tokenizer=FOLDER FILE..., got {} (tokenizer)",
          config.tokenizer.empty() ? "no tokenizer" : "no files");
  const auto num_jsonl = std::ranges::count_if(inputs, is_jsonl);
  require(num_jsonl == 0 || !config.field.empty(),
          "[tokenize] expected --field=KEY for .jsonl, got none (field)");
  require(num_jsonl > 0 || config.field.empty(),
          "[tokenize] expected no --field without a .jsonl, got {} (field)",
          engine::excerpt(config.field));
  require(config.prompt.empty() || !config.field.empty(),
          "[tokenize] expected --prompt with the --field of what follows it, got {} alone (prompt)",
          engine::excerpt(config.prompt));
  require(config.prompt.empty() || num_jsonl == std::ssize(inputs),
          "[tokenize] expected .jsonl alone with --prompt, as other files have none, got {} others "
          "(prompt)",
          std::ssize(inputs) - num_jsonl);
  require((!config.documents && config.prompt.empty()) || !config.out.empty(),
          "[tokenize] expected --out with --documents or --prompt, got none: lists of ids do not "
          "say which are learned (out)");
  require(config.out.empty() || config.out.ends_with(".bin"),
          "[tokenize] expected a file called .bin, as trainers take others for text, got {} (out)",
          engine::excerpt(config.out));
}

void print(std::span<const std::int32_t> ids) {
  std::string line = "[";
  for (const std::int32_t id : ids) fmt::format_to(std::back_inserter(line), "{}, ", id);
  if (!ids.empty()) line.resize(line.size() - 2);
  line += "]\n";
  std::fwrite(line.data(), 1, line.size(), stdout);
}

// Appends the ids of a document, and returns how many of them are not learned.
std::int64_t encode(const Document& document, const Tokenizer& tokenizer, Encoder& encoder,
                    bool special, std::vector<std::int32_t>& ids) {
  if (document.prompt.empty()) {
    encoder.encode(document.text, special, ids);
    return 0;
  }
  const auto add = [&](std::span<const std::int32_t> more) {
    if (special) ids.insert(ids.end(), more.begin(), more.end());
  };
  add(tokenizer.before());
  encoder.encode(document.prompt, /*add_special_tokens=*/false, ids);
  const std::int64_t num_not_learned = std::ssize(ids);
  encoder.encode(document.text, /*add_special_tokens=*/false, ids);
  add(tokenizer.after());
  return num_not_learned;
}

void run(int argc, char** argv) {
  FlagSet flags(
      "tokenize",
      "Texts to token ids, as a model's tokenizer makes them: tokenize --tokenizer=FOLDER "
      "FILE... Each file is a document, and of a .jsonl each line.");
  Config config;
  config.add_to(flags);
  const Words words = read_words(std::span(argv, static_cast<std::size_t>(argc)).subspan(1));
  if (!flags.parse(words.flags, std::cout)) return;
  check(config, words.inputs);
  const Tokenizer tokenizer = Tokenizer::read(resolve_user_path(config.tokenizer));
  std::optional<std::int32_t> end;
  if (!config.end.empty()) {
    end = tokenizer.id_of(config.end);
    require(end.has_value(), "[tokenize] expected a token of the tokenizer, got {} (end)",
            engine::excerpt(config.end));
  }
  Encoder encoder(tokenizer);
  const bool keeps_documents = config.documents || !config.prompt.empty();
  TokenWriter writer(tokenizer.vocab_size(), keeps_documents);
  std::int64_t num_documents = 0, nbytes = 0, num_masked = 0;
  std::vector<std::int32_t> ids;
  for (const std::string& input : words.inputs) {
    if (!is_jsonl(input)) {
      require_memory(engine::InputFile(input).nbytes(), "the text of " + engine::escaped(input),
                     "cut it into several, or give its documents as lines of a .jsonl");
    }
    const DocumentFields fields{.prompt = config.prompt, .text = config.field};
    visit_documents(input, fields, [&](const Document& document) {
      if (!document.remark.empty()) {
        write_to_stderr(
            {"warning: [tokenize] ", engine::escaped(input), " ", document.remark, "\n"},
            kWarningPatience);
      }
      ids.clear();
      const std::int64_t num_not_learned =
          encode(document, tokenizer, encoder, config.special, ids);
      if (end) ids.push_back(*end);
      if (config.out.empty()) return print(ids);
      if (keeps_documents) {
        writer.add_document(ids, num_not_learned);
        num_masked += num_not_learned;
        if (ids.empty()) return;
      } else {
        writer.add(ids);
      }
      ++num_documents;
      nbytes += std::ssize(document.prompt) + std::ssize(document.text);
    });
  }
  if (config.out.empty()) return;
  const std::string out = resolve_user_path(config.out);
  require<engine::IoError>(writer.num_tokens() > 0, "[tokenize] expected tokens, got none ({})",
                           engine::join(words.inputs, ", "));
  writer.write(out);
  const std::string apart = keeps_documents ? fmt::format(", {} of prompts, documents apart",
                                                          engine::with_commas(num_masked))
                                            : "";
  fmt::print("{} tokens of {} bits{} in {}: {} document{}, {} bytes, a vocabulary of {}\n",
             engine::with_commas(writer.num_tokens()), writer.num_bits(), apart,
             engine::escaped(out), engine::with_commas(num_documents),
             num_documents == 1 ? "" : "s", engine::with_commas(nbytes),
             engine::with_commas(tokenizer.vocab_size()));
}

}  // namespace
}  // namespace tessera::tools

int main(int argc, char** argv) {
  return tessera::tools::run_main([&] { tessera::tools::run(argc, argv); });
}
