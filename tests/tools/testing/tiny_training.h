// A training of train_transformer that takes a moment, in a folder of its own.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"

namespace tessera::testing {

inline const std::string kTransformer = "tools/programs/train_transformer";
inline const std::string kMlp = "tools/programs/train_mlp";

/// A folder with a text, and flags of a run that takes a moment; all else goes below it too. Such a
/// run does not measure the peak, which would take most of its time.
class TinyTraining : public ::testing::Test {
 protected:
  TinyTraining() {
    std::string text;
    while (text.size() < 4000) text += "In the beginning God created the heaven and the earth.\n";
    flags_ = {{"model.layers", "2"},   {"model.heads", "2"}, {"model.dim", "8"},
              {"model.seq", "8"},      {"train.steps", "3"}, {"train.batch", "1"},
              {"parallel.ranks", "2"}, {"log.every", "0"},   {"sample.tokens", "0"},
              {"device", "cpu"},       {"log.peak_ms", "0"}};
    flags_["data.path"] = folder_.write("text.txt", text);
    flags_["out"] = folder_ / "run";
  }

  /// The flags of a run, where `more` beats flags_.
  Flags with(const Flags& more) const {
    Flags flags = more;
    flags.insert(flags_.begin(), flags_.end());
    return flags;
  }
  Outcome run(const Flags& more = {}) const { return run_program(kTransformer, with(more)); }
  bool exists(const std::string& name) const { return std::filesystem::exists(folder_ / name); }
  /// What a run logged.
  std::vector<nlohmann::json> log_lines() const {
    std::vector<nlohmann::json> lines;
    std::istringstream file(folder_.read("run/log.jsonl"));
    for (std::string line; std::getline(file, line);) lines.push_back(parse_json(line));
    return lines;
  }
  nlohmann::json final_record() const { return log_lines().back().at("final"); }
  /// A run as a command for shell().
  std::string command(const Flags& more = {}) const {
    std::string command = kTransformer;
    for (const auto& [name, value] : with(more)) command += " --" + name + "=" + value;
    return command;
  }
  static Outcome shell(const std::string& script, const Flags& environment = {}) {
    return run_program("/bin/sh", std::vector<std::string>{"-c", script}, environment);
  }

  const TempFolder folder_;
  Flags flags_;
};

}  // namespace tessera::testing
