// A divergence in words and as JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/probe/divergence.h"

namespace tessera::tools {

/// One of the two runs that are compared.
struct DivergenceRun {
  std::string name;  ///< what was asked for: "parallel.strategy=ddp", or a file
  std::string path;  ///< of its record
  ProbeHeader header;
  std::string failure = {};  ///< how it ended, if not well
};

struct DivergenceResult {
  DivergenceRun a, b;
  DivergenceReport report;
  std::optional<ValueDifference> values = {};  ///< of the first tensor that differs
  /// Why there are no values, or what is strange about them; empty: nothing.
  std::string remark = {};
};

/// Lines for the terminal.
std::vector<std::string> lines_of(const DivergenceResult& result);
nlohmann::ordered_json to_json(const DivergenceResult& result);

}  // namespace tessera::tools
