// The options of the tokens that a model is trained on: --data.*.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tools/cli/flags.h"
#include "tools/cli/run_files.h"
#include "tools/config/data/document_config.h"
#include "tools/data/data_fit.h"
#include "tools/data/token_dataset.h"
#include "tools/data/token_file.h"
#include "tools/data/token_mix.h"
#include "tools/tokenizer/tokenizer.h"

namespace tessera::tools {

/// A file of a mix.
struct TokenSource {
  std::string path;
  double weight = 1;
};

/// The sources of --data.mix, whose paths may begin with ~. Throws InvalidArgument naming the
/// option for what is none: no weight, one that is not above 0, a file twice.
std::vector<TokenSource> parse_mix(const std::string& mix);
/// What parse_mix() reads as these.
std::string mix_option(const std::vector<TokenSource>& sources);

struct TokenDataConfig {
  std::string path;  ///< as it was typed; empty: see mix, or the text that Bazel supplies
  std::string mix;   ///< as it was typed; empty: path alone
  TokenFormat format = TokenFormat::kAuto;
  DocumentConfig documents;  ///< of each .jsonl
  std::string tokenizer;     ///< as it was typed; empty: the model's
  SampleOrder order = SampleOrder::kShuffle;
  double val_fraction = 0.005;
  bool packing = false;

  void add_to(FlagSet& flags);
  /// What is read, of path or mix; the text that Bazel supplies where neither is given. Throws
  /// IoError as data_path() does, InvalidArgument for both, for a mix that is none, and for options
  /// of a .jsonl without one.
  std::vector<TokenSource> sources() const;
  /// As sources(), but none where neither is given.
  std::vector<TokenSource> given_sources() const;
  /// Whether the texts of `source` are made tokens: a .jsonl, unless its bytes or numbers are asked
  /// for.
  bool is_tokenized(const TokenSource& source) const;
  /// Whether one of given_sources() is tokenized.
  bool tokenizes() const;
  /// The tokenizer of the option, or else of the model in `init_from`; none: neither is given, or
  /// that folder has no tokenizer. Throws IoError as Tokenizer::read().
  std::optional<Tokenizer> read_tokenizer(const std::string& init_from) const;
  /// The tokens of one of sources(). Throws IoError as TokenFile, encode_documents() and
  /// DocumentConfig::ends() do, and for a .jsonl without a tokenizer.
  TokenFile open(const TokenSource& source, const std::optional<Tokenizer>& tokenizer) const;
  /// What decides which tokens open() returns, but for the content of files.
  std::string reading(const TokenSource& source, const std::string& init_from) const;
  /// The inputs of a run, named by their option: `sources`, and what the tokenizer is read from.
  std::vector<RunFile> run_files(const std::vector<TokenSource>& sources) const;
  /// Of given_sources() the files that are there and are not tokenized. Throws IoError as TokenFile
  /// does.
  std::vector<TokenFile> files_if_there() const;
  /// Whether the data keep documents apart, as far as files are there. Throws as files_if_there().
  bool keeps_documents() const;
  /// Checks what files_if_there() returns. Throws as check_mix_fit(), and InvalidArgument for
  /// packing where no file is given.
  std::vector<std::string> check_heads(const DataFit& fit) const;
  /// For whom the tokens are; `init_from`: see DataFit.
  DataFit fit(std::int64_t vocab, const std::string& init_from) const {
    return {format, vocab, init_from, mix.empty() ? "data.path" : "data.mix"};
  }
  /// What is trained on, in sequences of `seq`. Throws IoError or InvalidArgument as sources(),
  /// open(), check_mix_fit(), TokenDataset and TokenMix do, and for the tokenizer of bytes.
  TokenMix dataset(const DataFit& fit, std::int64_t seq, std::int64_t seed,
                   const std::optional<Tokenizer>& tokenizer = {}) const;

 private:
  void check_files(std::span<const TokenFile> files, const DataFit& fit, bool packs) const;
};

}  // namespace tessera::tools
