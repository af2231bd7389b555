// Runs as a log would tell of them, without a training.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tools/compare/comparison/run_record.h"

namespace tessera::testing {

/// Steps of 10, 11, ... ms, 100 tokens/s and 1 MiB.
inline tools::RunRecord run_of(std::vector<double> loss, std::string sha = "same") {
  tools::RunRecord run;
  run.loss = std::move(loss);
  run.params_sha256 = std::move(sha);
  for (std::size_t i = 0; i < run.loss.size(); ++i) {
    run.metrics["step_ms"].push_back(10.0 + double(i));
    run.metrics["tokens_per_s"].push_back(100);
  }
  run.peak_bytes = {{"optimizer", 5}, {"total", 1 << 20}};
  return run;
}

/// A run of each round, whose steps are all as fast: `tokens_per_s` of the round.
inline std::vector<tools::RunRecord> rounds_of(const std::vector<double>& tokens_per_s,
                                               std::int64_t peak_nbytes = 1 << 20) {
  std::vector<tools::RunRecord> rounds;
  for (const double speed : tokens_per_s) {
    rounds.push_back(run_of({3, 2, 1}));
    rounds.back().metrics["tokens_per_s"] = {1, speed, speed};
    rounds.back().peak_bytes["total"] = peak_nbytes;
  }
  return rounds;
}

}  // namespace tessera::testing
