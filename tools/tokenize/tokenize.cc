// Texts to token ids: to read, or a file to train on.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iostream>
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
#include "tools/config/data/document_config.h"
#include "tools/data/document_encoder.h"
#include "tools/data/documents.h"
#include "tools/data/token_file.h"
#include "tools/data/token_writer.h"
#include "tools/planning/require_memory.h"
#include "tools/tokenizer/tokenizer.h"

namespace tessera::tools {
namespace {

using engine::require;

struct Config {
  std::string tokenizer, out;
  DocumentConfig lines{.end = "none"};
  bool documents = false;

  bool keeps_documents() const { return documents || lines.fields("").reads_only(); }

  void add_to(FlagSet& flags) {
    flags.add("tokenizer", &tokenizer,
              {.help = "folder of a model with tokenizer.json, or with GPT-2's vocab.json and "
                       "merges.txt; or a tokenizer.json"});
    flags.add("out", &out,
              {.help = "file to write the tokens of all documents to, for --data.path of "
                       "train_transformer, called .bin; empty: prints them"});
    lines.add_to(flags, "");
    flags.add("documents", &documents,
              {.help = "keeps documents apart in the file: each is learned by itself, and not as a "
                       "part of one long text"});
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
                                word == "--prompt" || word == "--template" || word == "--loss" ||
                                word == "--end" || word == "--config";
    if (has_next_value && i + 1 < arguments.size()) words.flags.push_back(arguments[++i]);
  }
  return words;
}

void check(const Config& config, const std::vector<std::string>& inputs) {
  require(!config.tokenizer.empty() && !inputs.empty(),
          "[tokenize] expected --tokenizer=FOLDER FILE..., got {} (tokenizer)",
          config.tokenizer.empty() ? "no tokenizer" : "no files");
  const auto num_jsonl = std::ranges::count_if(inputs, is_jsonl);
  require(num_jsonl > 0 || !config.lines.reads_lines(),
          "[tokenize] expected a .jsonl with --field, --prompt, --template or --loss, got {}",
          engine::excerpt(inputs.front()));
  require(!config.lines.fields("").reads_only() || num_jsonl == std::ssize(inputs),
          "[tokenize] expected .jsonl alone with --prompt or --template, of which other files have "
          "none, got {} others",
          std::ssize(inputs) - num_jsonl);
  require(!config.keeps_documents() || !config.out.empty(),
          "[tokenize] expected --out with --documents, or where texts are only read, got none: "
          "lists of ids do not say which are learned (out)");
  require(config.out.empty() || config.out.ends_with(".bin"),
          "[tokenize] expected a file called .bin, as trainers take others for text, got {} (out)",
          engine::excerpt(config.out));
}

void print(std::span<const std::int32_t> ids) { fmt::print("[{}]\n", fmt::join(ids, ", ")); }

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
  const DocumentFields fields = config.lines.fields("");
  DocumentEncoder encoder(tokenizer, config.lines.ends(tokenizer, ""));
  const bool keeps_documents = config.keeps_documents();
  TokenWriter writer(tokenizer.vocab_size(), keeps_documents);
  std::int64_t num_documents = 0, nbytes = 0, num_read_only = 0;
  std::vector<std::int32_t> ids;
  for (const std::string& input : words.inputs) {
    if (!is_jsonl(input)) {
      require_memory(engine::InputFile(input).nbytes(), "the text of " + engine::escaped(input),
                     "cut it into several, or give its documents as lines of a .jsonl");
    }
    visit_documents(input, fields, [&](const Document& document) {
      if (!document.remark.empty()) {
        write_to_stderr(
            {"warning: [tokenize] ", engine::escaped(input), " ", document.remark, "\n"},
            kWarningPatience);
      }
      const std::span<const std::uint32_t> tokens = encoder.encode(document);
      if (keeps_documents) {
        writer.add_document(tokens);
        num_read_only += std::ranges::count_if(
            tokens, [](std::uint32_t token) { return (token & kNotLearned) != 0; });
        if (tokens.empty()) return;
      } else {  // all are learned
        ids.assign(tokens.begin(), tokens.end());
        if (config.out.empty()) return print(ids);
        writer.add(ids);
      }
      ++num_documents;
      nbytes += document.nbytes();
    });
  }
  if (config.out.empty()) return;
  const std::string out = resolve_user_path(config.out);
  require<engine::IoError>(writer.num_tokens() > 0, "[tokenize] expected tokens, got none ({})",
                           engine::join(words.inputs, ", "));
  writer.write(out);
  const std::string apart = keeps_documents ? fmt::format(", {} only read, documents apart",
                                                          engine::with_commas(num_read_only))
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
