// The table of the page: a row for each configuration, in the units that its largest figures ask
// for.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace tessera::tools {

/// How the numbers of a configuration stand to those of the baseline, in words that have the
/// distance: "equal bits", "up to 0.0021 apart", "differs by 0.2", "failed", "not trained".
struct ParityWords {
  std::string style;  ///< the class of what shows them
  std::string words;
};
ParityWords parity_words(const nlohmann::ordered_json& row);

/// `data`: to_json(). In `untold` are the columns without a single figure, which are left out.
std::string report_table(const nlohmann::ordered_json& data, std::vector<std::string>& untold);

}  // namespace tessera::tools
