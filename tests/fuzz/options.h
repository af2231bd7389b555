// A set of options with one of each kind.
#pragma once

#include <sstream>
#include <string>
#include <vector>

#include "tests/fuzz/target.h"
#include "tests/testing/temp_folder.h"
#include "tools/cli/flags.h"

namespace tessera::fuzz {

struct Options {
  bool shuffle = false;
  std::int64_t steps = 1;
  int layers = 2;
  double lr = 0.1, clip = 0;
  std::string strategy = "ddp", path, reshard = "true";

  /// False: help was asked for.
  bool parse(const std::vector<std::string>& arguments) {
    std::vector<const char*> words;
    for (const std::string& argument : arguments) words.push_back(argument.c_str());
    std::ostringstream out;
    return flags.parse(words, out);
  }

  tools::FlagSet flags = bound();

 private:
  tools::FlagSet bound() {
    tools::FlagSet set("fuzz", "One option of each kind.");
    set.add("data.shuffle", &shuffle, {.help = "a bool"});
    set.add("train.steps", &steps, {.help = "an integer", .min = 0});
    set.add("model.layers", &layers, {.help = "a bounded integer", .min = 1, .max = 64});
    set.add("train.lr", &lr, {.help = "a number", .min = 0, .above_min = true});
    set.add("train.clip", &clip, {.help = "any number"});
    set.add("parallel.strategy", &strategy, {.help = "choices", .choices = {"ddp", "zero3"}});
    set.add("parallel.reshard", &reshard,
            {.help = "choices or a number", .choices = {"true", "false"}, .max_number = 64});
    set.add("data.path", &path, {.help = "any text"});
    return set;
  }
};

/// What is in force, written to a file and read from it, is the same.
inline void write_and_read(const Options& options, const testing::TempFolder& folder) {
  Options again;
  again.parse({"--config=" + folder.write("again.toml", options.flags.to_toml())});
  promise(again.flags.to_json() == options.flags.to_json(), "expected the same options again");
}

}  // namespace tessera::fuzz
