#include "tools/config/data/token_data_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include "engine/error.h"
#include "engine/io/text.h"
#include "tools/config/data/data_path.h"
#include "tools/config/data/default_data.h"
#include "tools/data/document_encoder.h"
#include "tools/data/documents.h"

namespace tessera::tools {

using engine::IoError;
using engine::require;

constexpr std::string_view kPrefix = "data.";

void TokenDataConfig::add_to(FlagSet& flags) {
  flags.add(
      "data.path", &path,
      {.help = "text file (tokens by the tokenizer of data.tokenizer or init.from, or else "
               "bytes), .bin token file of llm.c, nanoGPT or //tools:tokenize, or .jsonl with "
               "a document in each line; empty: the King James Bible"});
  flags.add("data.mix", &mix,
            {.help = "several files in place of data.path, with their shares of the training "
                     "sequences: FILE:WEIGHT,FILE:WEIGHT,..."});
  flags.add(
      "data.format", &format,
      EnumOption<TokenFormat>{
          "of data.path or data.mix; auto: of a .bin file what its header says or else uint16, of "
          "a .jsonl the tokens of its texts, of any other those of a text, or bytes where no "
          "tokenizer is known; uint16, uint32: token ids from the first byte on, little-endian; "
          "bytes: of whatever file",
          {{"auto", TokenFormat::kAuto},
           {"bytes", TokenFormat::kBytes},
           {"uint16", TokenFormat::kUInt16},
           {"uint32", TokenFormat::kUInt32}}});
  documents.add_to(flags, std::string(kPrefix));
  flags.add("data.tokenizer", &tokenizer,
            {.help = "folder of a model with tokenizer.json, or with GPT-2's vocab.json and "
                     "merges.txt, or a tokenizer.json, whose tokens the data are: makes them of "
                     "texts, and samples text again; empty: that of init.from, if it has one"});
  flags.add("data.order", &order,
            EnumOption<SampleOrder>{
                "of training sequences",
                {{"shuffle", SampleOrder::kShuffle}, {"sequential", SampleOrder::kSequential}}});
  flags.add("data.val_fraction", &val_fraction,
            {.help = "part of the sequences, at the end, kept for validation; 0: none",
             .min = 0,
             .max = 1,
             .below_max = true});
  flags.add(
      "data.packing", &packing,
      {.help = "a sequence holds several of the documents that data.path keeps apart, each of "
               "which sees itself alone; false: one, and padding"});
}

std::vector<TokenSource> TokenDataConfig::sources() const {
  std::vector<TokenSource> given = given_sources();
  if (given.empty()) given.push_back({data_path("", kDefaultText, kHowToGetText)});
  return given;
}

std::vector<TokenSource> TokenDataConfig::given_sources() const {
  require(path.empty() || mix.empty(),
          "[config] expected data.path or data.mix, got both, {} and {}", path, mix);
  std::vector<TokenSource> sources;
  if (!mix.empty()) sources = parse_mix(mix);
  if (!path.empty()) sources.push_back({resolve_user_path(path)});
  const auto lines = [this](const TokenSource& source) { return has_lines(source); };
  require(!documents.reads_lines() || std::ranges::any_of(sources, lines),
          "[config] expected a .jsonl in data.path or data.mix, and no data.format, with "
          "data.field, data.prompt, data.template or data.loss, got {}",
          sources.empty() ? "neither"
          : mix.empty()   ? sources.front().path
                          : mix);
  if (documents.reads_lines()) static_cast<void>(documents.fields(kPrefix));  // or throws
  return sources;
}

// As sources(), of which that of Bazel need not be there.
std::vector<TokenSource> TokenDataConfig::named_sources() const {
  std::vector<TokenSource> named = given_sources();
  if (named.empty()) named.push_back({kDefaultText});
  return named;
}

void TokenDataConfig::check_ends(bool has_tokenizer) const {
  const auto is_made = [&](const TokenSource& source) {
    return has_lines(source) || (is_text(source) && has_tokenizer);
  };
  require(!documents.is_around() || std::ranges::any_of(named_sources(), is_made),
          "[config] expected a text and its tokenizer, or a .jsonl, and no data.format, with "
          "data.special or data.end, got {}",
          mix.empty() ? named_sources().front().path : mix);
}

bool TokenDataConfig::has_lines(const TokenSource& source) const {
  return format == TokenFormat::kAuto && is_jsonl(source.path);
}

bool TokenDataConfig::is_text(const TokenSource& source) const {
  return format == TokenFormat::kAuto && !is_jsonl(source.path) && !source.path.ends_with(".bin");
}

bool TokenDataConfig::is_tokenized(const TokenSource& source, const std::string& init_from) const {
  return has_lines(source) || (is_text(source) && has_tokenizer(init_from));
}

bool TokenDataConfig::tokenizes(const std::string& init_from) const {
  return std::ranges::any_of(
      named_sources(), [&](const TokenSource& source) { return is_tokenized(source, init_from); });
}

bool TokenDataConfig::has_tokenizer(const std::string& init_from) const {
  if (!tokenizer.empty() || init_from.empty()) return !tokenizer.empty();
  const std::string folder = resolve_user_path(init_from);
  return std::ranges::any_of(std::array{"/tokenizer.json", "/vocab.json"}, [&](const char* name) {
    std::error_code ignored;
    return std::filesystem::exists(folder + name, ignored);
  });
}

std::optional<Tokenizer> TokenDataConfig::read_tokenizer(const std::string& init_from) const {
  if (!has_tokenizer(init_from)) return std::nullopt;
  return Tokenizer::read(resolve_user_path(tokenizer.empty() ? init_from : tokenizer));
}

namespace {

bool is_there(const TokenSource& source) {
  std::error_code ignored;
  return std::filesystem::exists(source.path, ignored);
}

void check_tokenizer(const TokenSource& source, bool is_known) {
  require<IoError>(is_known,
                   "[config] expected the tokenizer of the texts in a .jsonl, got none: give "
                   "--data.tokenizer, or the folder of a model that has one as --init.from; or "
                   "train on its bytes as they are with --data.format=bytes (data.tokenizer, {})",
                   source.path);
}

}  // namespace

DocumentEnds TokenDataConfig::ends(const TokenSource& source, const Tokenizer& tokens) const {
  return has_lines(source) ? documents.ends(tokens, kPrefix)
                           : documents.ends_of_text(tokens, kPrefix);
}

TokenFile TokenDataConfig::open(const TokenSource& source,
                                const std::optional<Tokenizer>& tokens) const {
  if (has_lines(source)) {
    check_tokenizer(source, tokens.has_value());
    return {source.path, encode_documents(source.path, documents.fields(kPrefix), *tokens,
                                          ends(source, *tokens))};
  }
  TokenFile file(source.path, format);
  if (!is_text(source) || !tokens) return file;
  return {source.path, encode_text(source.path, *tokens, ends(source, *tokens))};
}

std::string TokenDataConfig::reading(const TokenSource& source,
                                     const std::string& init_from) const {
  std::string text = fmt::format("{}\n{}", source.path, int(format));
  if (!is_tokenized(source, init_from)) return text;
  for (const std::string& option :
       {documents.field, documents.prompt, documents.chat_template, documents.end,
        documents.loss == LearnedPart::kAll ? std::string("all") : "",
        documents.special ? std::string("special") : "",
        tokenizer.empty() ? init_from : tokenizer}) {
    text += '\0' + option;
  }
  return text;
}

std::vector<RunFile> TokenDataConfig::run_files(const std::vector<TokenSource>& sources) const {
  std::vector<RunFile> files;
  for (const TokenSource& source : sources)
    files.push_back({mix.empty() ? "data.path" : "data.mix", source.path});
  if (tokenizer.empty()) return files;
  const std::string at = resolve_user_path(tokenizer);
  std::error_code ignored;
  if (!std::filesystem::is_directory(at, ignored)) {
    files.push_back({"data.tokenizer", at});
    return files;
  }
  constexpr std::string_view kNames[] = {"/tokenizer.json", "/tokenizer_config.json", "/vocab.json",
                                         "/merges.txt"};
  for (RunFile& file : tools::files_of("data.tokenizer", at, kNames))
    files.push_back(std::move(file));
  return files;
}

std::int64_t TokenDataConfig::tokens_nbytes(const std::string& init_from) const {
  // A token of 4 bytes has about as many of text, and memory that grows is there twice.
  constexpr std::int64_t kKept = 2, kWhileEncoded = 6;
  std::int64_t nbytes = 0, largest_text = 0;
  for (const TokenSource& source : sources()) {
    if (!is_tokenized(source, init_from)) continue;
    const std::int64_t size = TokenFile(source.path, TokenFormat::kBytes).num_tokens();
    nbytes += size;
    if (is_text(source)) largest_text = std::max(largest_text, size);
  }
  return kKept * nbytes + (kWhileEncoded - kKept) * largest_text;
}

std::vector<TokenFile> TokenDataConfig::files_if_there() const {
  std::vector<TokenFile> files;
  for (const TokenSource& source : given_sources()) {
    if (!has_lines(source) && is_there(source)) files.emplace_back(source.path, format);
  }
  return files;
}

bool TokenDataConfig::keeps_documents() const {
  const auto lines = [this](const TokenSource& source) { return has_lines(source); };
  return std::ranges::any_of(given_sources(), lines) ||
         std::ranges::any_of(files_if_there(), &TokenFile::keeps_documents);
}

std::vector<std::string> TokenDataConfig::check_heads(const DataFit& fit) const {
  const std::vector<TokenFile> files = files_if_there();
  const std::vector<TokenSource> given = given_sources();
  require(!packing || !given.empty(),
          "[config] expected data.path, of documents, with data.packing, got none");
  check_ends(fit.tokenizes);
  for (const TokenSource& source : given) {
    if (!has_lines(source)) continue;
    check_tokenizer(source, !tokenizer.empty() || !fit.init_from.empty());
    for (const TokenFile& file : files) {
      require<IoError>(!are_tokens_bytes(file, fit),
                       "[data] expected sources of one kind of tokens, got text in {} and those of "
                       "a tokenizer in {} (data.mix)",
                       file.path(), source.path);
    }
  }
  check_files(files, fit, packing && files.size() == given.size());
  std::optional<Tokenizer> tokens;
  for (const TokenSource& source : given) {
    if (!is_tokenized(source, fit.init_from) || !is_there(source)) continue;
    if (!tokens) tokens = read_tokenizer(fit.init_from);
    if (tokens) static_cast<void>(ends(source, *tokens));  // or throws
  }
  std::vector<std::string> lines;
  for (const TokenFile& file : files) {
    if (file.is_bytes() && !are_tokens_bytes(file, fit)) continue;  // its tokens are not known
    for (const std::string& line : data_warnings(file, fit, file.max_possible_token())) {
      lines.push_back(mix.empty() ? line
                                  : fmt::format("{}: {}", engine::escaped(file.path()), line));
    }
  }
  return lines;
}

void TokenDataConfig::check_files(std::span<const TokenFile> files, const DataFit& fit,
                                  bool packs) const {
  check_mix_fit(files, fit, packs);
  require(
      tokenizer.empty() || files.empty() || !are_tokens_bytes(files.front(), fit),
      "[config] expected no tokenizer of data whose tokens are bytes, got {} (data.tokenizer, {})",
      engine::excerpt(tokenizer), files.empty() ? "" : files.front().path());
}

TokenMix TokenDataConfig::dataset(const DataFit& given_fit, std::int64_t seq, std::int64_t seed,
                                  const std::optional<Tokenizer>& tokens) const {
  DataFit fit = given_fit;
  fit.tokenizes = tokens.has_value();
  const std::vector<TokenSource> all = sources();
  check_ends(fit.tokenizes);
  std::vector<TokenFile> files;
  for (const TokenSource& source : all) {
    if (is_text(source)) check_data_fit(TokenFile(source.path), fit);
    files.push_back(open(source, tokens));
  }
  std::vector<double> weights;
  for (const TokenSource& source : all) weights.push_back(source.weight);
  check_files(files, fit, packing);
  const auto first_seed = static_cast<std::uint64_t>(seed);
  std::vector<TokenDataset> data;
  for (std::size_t i = 0; i < files.size(); ++i) {
    // Sources of one size are in other orders; the first is in that which it has alone.
    constexpr std::uint64_t kBetweenSeeds = 0x9E3779B97F4A7C15;  // odd, and far from small seeds
    data.emplace_back(std::move(files[i]),
                      TokenDatasetOptions{.seq = seq,
                                          .vocab = fit.vocab,
                                          .val_fraction = val_fraction,
                                          .order = order,
                                          .seed = first_seed + i * kBetweenSeeds,
                                          .packing = packing});
  }
  return {std::move(data), weights, first_seed};
}

}  // namespace tessera::tools
