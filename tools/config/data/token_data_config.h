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
#include "tools/config/data/token_source.h"
#include "tools/data/data_fit.h"
#include "tools/data/token_dataset.h"
#include "tools/data/token_file.h"
#include "tools/data/token_mix.h"
#include "tools/tokenizer/tokenizer.h"

namespace tessera::tools {

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
  /// of a .jsonl's lines without one.
  std::vector<TokenSource> sources() const;
  /// As sources(), but none where neither is given.
  std::vector<TokenSource> given_sources() const;
  /// Whether lines of `source` are documents: of a .jsonl, unless its bytes or numbers are asked
  /// for.
  bool has_lines(const TokenSource& source) const;
  /// Whether `source` is a text: any other file but a .bin, unless so.
  bool is_text(const TokenSource& source) const;
  /// Whether a tokenizer is known: read_tokenizer() has one to return, or an error.
  bool has_tokenizer(const std::string& init_from) const;
  /// Whether `source` is made tokens: lines are, and a text where a tokenizer is known.
  bool is_tokenized(const TokenSource& source, const std::string& init_from) const;
  /// Whether one of the sources is tokenized.
  bool tokenizes(const std::string& init_from) const;
  /// The tokenizer of the option, or else of the model in `init_from`; none: neither is given, or
  /// that folder has no tokenizer. Throws IoError as Tokenizer::read().
  std::optional<Tokenizer> read_tokenizer(const std::string& init_from) const;
  /// What stands around each text of one of sources(). Throws as DocumentConfig::ends().
  DocumentEnds ends(const TokenSource& source, const Tokenizer& tokenizer) const;
  /// The tokens of one of sources(), of a text its bytes where there is no tokenizer. Throws
  /// IoError as TokenFile, encode_documents(), encode_text() and ends() do, and for a .jsonl
  /// without a tokenizer.
  TokenFile open(const TokenSource& source, const std::optional<Tokenizer>& tokenizer) const;
  /// What decides which tokens open() returns, but for the content of files.
  std::string reading(const TokenSource& source, const std::string& init_from) const;
  /// The inputs of a run, named by their option: `sources`, and what the tokenizer is read from.
  std::vector<RunFile> run_files(const std::vector<TokenSource>& sources) const;
  /// About as many bytes of memory as dataset() takes for the tokens that it makes. Throws IoError
  /// as sources() and TokenFile do.
  std::int64_t tokens_nbytes(const std::string& init_from) const;
  /// Of given_sources() the files that are there and have no lines, of a text its bytes. Throws
  /// IoError as TokenFile does.
  std::vector<TokenFile> files_if_there() const;
  /// Whether the data keep documents apart, as far as files are there. Throws as files_if_there().
  bool keeps_documents() const;
  /// Checks what files_if_there() returns, and the tokenizer where one of the files is there that
  /// it is for. Throws as check_mix_fit(), Tokenizer::read() and ends(), and InvalidArgument for
  /// packing where no file is given.
  std::vector<std::string> check_heads(const DataFit& fit) const;
  /// For whom the tokens are; `init_from`: see DataFit.
  DataFit fit(std::int64_t vocab, const std::string& init_from) const {
    return {format, vocab, init_from, mix.empty() ? "data.path" : "data.mix",
            has_tokenizer(init_from)};
  }
  /// What is trained on, in sequences of `seq`. Throws IoError or InvalidArgument as sources(),
  /// open(), check_mix_fit(), TokenDataset and TokenMix do, and for the tokenizer of bytes.
  TokenMix dataset(const DataFit& fit, std::int64_t seq, std::int64_t seed,
                   const std::optional<Tokenizer>& tokenizer = {}) const;

 private:
  std::vector<TokenSource> named_sources() const;
  void check_ends(bool has_tokenizer) const;
  void check_files(std::span<const TokenFile> files, const DataFit& fit, bool packs) const;
};

}  // namespace tessera::tools
