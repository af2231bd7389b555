#include "tools/config/data/token_data_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
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
#include "tools/data/mix_order.h"

namespace tessera::tools {

using engine::IoError;
using engine::require;

constexpr std::string_view kPrefix = "data.";

void TokenDataConfig::add_to(FlagSet& flags) {
  flags.add("data.path", &path,
            {.help = "text file (bytes are tokens), .bin token file of llm.c, nanoGPT or "
                     "//tools:tokenize, or .jsonl with a document in each line; empty: the King "
                     "James Bible"});
  flags.add("data.mix", &mix,
            {.help = "several files in place of data.path, with their shares of the training "
                     "sequences: FILE:WEIGHT,FILE:WEIGHT,..."});
  flags.add(
      "data.format", &format,
      EnumOption<TokenFormat>{
          "of data.path or data.mix; auto: of a .bin file what its header says or else uint16, of "
          "a "
          ".jsonl the tokens of its texts, and bytes of any other; uint16, uint32: token ids from "
          "the first byte on, little-endian; bytes: of whatever file",
          {{"auto", TokenFormat::kAuto},
           {"bytes", TokenFormat::kBytes},
           {"uint16", TokenFormat::kUInt16},
           {"uint32", TokenFormat::kUInt32}}});
  documents.add_to(flags, std::string(kPrefix));
  flags.add("data.tokenizer", &tokenizer,
            {.help = "folder of a model with tokenizer.json, or with GPT-2's vocab.json and "
                     "merges.txt, or a tokenizer.json, whose tokens the data are: makes them of a "
                     ".jsonl, and samples text again; empty: that of init.from, if it has one"});
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

std::vector<TokenSource> parse_mix(const std::string& mix) {
  std::vector<TokenSource> sources;
  std::vector<double> weights;
  for (std::size_t begin = 0; begin <= mix.size();) {
    const std::size_t end = std::min(mix.find(',', begin), mix.size());
    const std::string part = mix.substr(begin, end - begin);
    begin = end + 1;
    const std::size_t colon = part.rfind(':');
    TokenSource source;
    const char* const last = part.data() + part.size();
    bool is_source = colon != std::string::npos && colon > 0;
    if (is_source) {
      source.path = resolve_user_path(part.substr(0, colon));
      const auto [at, error] = std::from_chars(part.data() + colon + 1, last, source.weight);
      is_source = error == std::errc() && at == last && std::isfinite(source.weight);
    }
    require(is_source && source.weight > 0,
            "[config] expected FILE:WEIGHT with a weight above 0, and commas between them, got "
            "'{}' in '{}' (data.mix)",
            part, mix);
    require(std::ranges::find(sources, source.path, &TokenSource::path) == sources.end(),
            "[config] expected a file once, got {} twice (data.mix)", source.path);
    weights.push_back(source.weight);
    sources.push_back(std::move(source));
  }
  static_cast<void>(MixOrder(weights, 0));  // or throws
  return sources;
}

std::string mix_option(const std::vector<TokenSource>& sources) {
  std::string text;
  for (const TokenSource& source : sources)
    text += fmt::format("{}{}:{}", text.empty() ? "" : ",", source.path, source.weight);
  return text;
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
  const auto tokenized = [this](const TokenSource& source) { return is_tokenized(source); };
  require(!documents.is_given() || std::ranges::any_of(sources, tokenized),
          "[config] expected a .jsonl in data.path or data.mix, and no data.format, with "
          "data.field, data.prompt, data.template, data.loss, data.special or data.end, got {}",
          sources.empty() ? "neither"
          : mix.empty()   ? sources.front().path
                          : mix);
  if (documents.is_given()) static_cast<void>(documents.fields(kPrefix));  // or throws
  return sources;
}

bool TokenDataConfig::is_tokenized(const TokenSource& source) const {
  return format == TokenFormat::kAuto && is_jsonl(source.path);
}

bool TokenDataConfig::tokenizes() const {
  return std::ranges::any_of(given_sources(),
                             [this](const TokenSource& source) { return is_tokenized(source); });
}

std::optional<Tokenizer> TokenDataConfig::read_tokenizer(const std::string& init_from) const {
  if (!tokenizer.empty()) return Tokenizer::read(resolve_user_path(tokenizer));
  if (init_from.empty()) return std::nullopt;
  const std::string folder = resolve_user_path(init_from);
  for (const std::string_view name : {"/tokenizer.json", "/vocab.json"}) {
    std::error_code ignored;
    if (std::filesystem::exists(folder + std::string(name), ignored))
      return Tokenizer::read(folder);
  }
  return std::nullopt;
}

namespace {

void check_tokenizer(const TokenSource& source, bool is_known) {
  require<IoError>(is_known,
                   "[config] expected the tokenizer of the texts in a .jsonl, got none: give "
                   "--data.tokenizer, or the folder of a model that has one as --init.from; or "
                   "train on its bytes as they are with --data.format=bytes (data.tokenizer, {})",
                   source.path);
}

}  // namespace

TokenFile TokenDataConfig::open(const TokenSource& source,
                                const std::optional<Tokenizer>& tokens) const {
  if (!is_tokenized(source)) return TokenFile(source.path, format);
  check_tokenizer(source, tokens.has_value());
  return {source.path, encode_documents(source.path, documents.fields(kPrefix), *tokens,
                                        documents.ends(*tokens, kPrefix))};
}

std::string TokenDataConfig::reading(const TokenSource& source,
                                     const std::string& init_from) const {
  std::string text = fmt::format("{}\n{}", source.path, int(format));
  if (!is_tokenized(source)) return text;
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

std::vector<TokenFile> TokenDataConfig::files_if_there() const {
  std::vector<TokenFile> files;
  for (const TokenSource& source : given_sources()) {
    std::error_code ignored;
    if (is_tokenized(source) || !std::filesystem::exists(source.path, ignored)) continue;
    files.emplace_back(source.path, format);
  }
  return files;
}

bool TokenDataConfig::keeps_documents() const {
  return tokenizes() || std::ranges::any_of(files_if_there(), &TokenFile::keeps_documents);
}

std::vector<std::string> TokenDataConfig::check_heads(const DataFit& fit) const {
  const std::vector<TokenFile> files = files_if_there();
  const std::size_t num_given = given_sources().size();
  require(!packing || num_given > 0,
          "[config] expected data.path, of documents, with data.packing, got none");
  for (const TokenSource& source : given_sources()) {
    if (!is_tokenized(source)) continue;
    check_tokenizer(source, !tokenizer.empty() || !fit.init_from.empty());
    for (const TokenFile& file : files) {
      require<IoError>(!file.is_bytes(),
                       "[data] expected sources of one kind of tokens, got text in {} and those of "
                       "a tokenizer in {} (data.mix)",
                       file.path(), source.path);
    }
  }
  require(tokenizer.empty() || num_given > 0,
          "[config] expected data.path or data.mix with data.tokenizer, got neither");
  check_files(files, fit, packing && files.size() == num_given);
  std::vector<std::string> lines;
  for (const TokenFile& file : files) {
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
      tokenizer.empty() || files.empty() || !files.front().is_bytes(),
      "[config] expected no tokenizer of data whose tokens are bytes, got {} (data.tokenizer, {})",
      engine::excerpt(tokenizer), files.empty() ? "" : files.front().path());
}

TokenMix TokenDataConfig::dataset(const DataFit& fit, std::int64_t seq, std::int64_t seed,
                                  const std::optional<Tokenizer>& tokens) const {
  const std::vector<TokenSource> all = sources();
  std::vector<TokenFile> files;
  for (const TokenSource& source : all) files.push_back(open(source, tokens));
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
