// The options of the tokens that a model is trained on: --data.*.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "tools/cli/flags.h"
#include "tools/data/data_fit.h"
#include "tools/data/token_dataset.h"

namespace tessera::tools {

struct TokenDataConfig {
  std::string path;  ///< as it was typed; empty: the text that Bazel supplies
  TokenFormat format = TokenFormat::kAuto;
  SampleOrder order = SampleOrder::kShuffle;
  double val_fraction = 0.005;
  bool packing = false;

  void add_to(FlagSet& flags);
  /// Where the file is. Throws IoError as data_path() does.
  std::string resolved_path() const;
  /// The file at `path`; none where that is empty or there is no such file. Throws IoError as
  /// TokenFile does.
  std::optional<TokenFile> file_if_there() const;
  /// For whom the tokens are; `init_from`: see DataFit.
  DataFit fit(std::int64_t vocab, const std::string& init_from) const;
  /// What a model of `vocab` tokens is trained on, in sequences of `seq`. Throws IoError or
  /// InvalidArgument as data_path(), check_data_fit() and TokenDataset do.
  TokenDataset dataset(const DataFit& fit, std::int64_t seq, std::int64_t seed) const;
};

}  // namespace tessera::tools
