// What tests of flags parse.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tools/cli/flags.h"

namespace tessera::tools {

enum class Device { kCpu, kCuda };

/// A configuration with an option of every kind.
struct Program {
  std::string strategy = "ddp";
  std::int64_t layers = 2;
  int batch = 4;
  std::uint64_t seed = 1;
  double lr = 0.001;
  double dropout = 0;
  bool recompute = false;
  Device device = Device::kCpu;
  std::string path;
  bool quiet = false;
  FlagSet flags{"train", "Trains a model."};
  std::ostringstream out;

  Program() {
    flags.add("parallel.strategy", &strategy,
              {.help = "who holds what", .choices = {"ddp", "zero1", "zero3"}});
    flags.add("model.layers", &layers, {.help = "blocks", .min = 1, .max = 64});
    flags.add("train.batch", &batch, {.help = "samples of a step", .min = 1});
    flags.add("train.seed", &seed, {.help = "of all that is random", .min = 0});
    flags.add("train.lr", &lr, {.help = "learning rate", .min = 0, .above_min = true});
    flags.add("model.dropout", &dropout, {.help = "share", .min = 0, .max = 1, .below_max = true});
    flags.add("train.recompute", &recompute, {.help = "save memory"});
    flags.add("device", &device,
              {.help = "where", .choices = {{"cpu", Device::kCpu}, {"cuda", Device::kCuda}}});
    flags.add("data.path", &path, {.help = "tokens"});
    flags.add("quiet", &quiet, {.help = "say less"});
  }
  bool parse(std::vector<const char*> arguments) { return flags.parse(arguments, out); }
  std::string refusal(std::vector<const char*> arguments) {
    return testing::error_of<engine::InvalidArgument>([&] { parse(std::move(arguments)); });
  }
};

/// What --config=FILE says of `text`, whatever kind of error it is; "" if nothing.
inline std::string file_refusal(Program& program, const testing::TempFolder& folder,
                                std::string_view text) {
  const std::string flag = "--config=" + folder.write("run.toml", text);
  try {
    program.parse({flag.c_str()});
  } catch (const engine::Error& error) {
    return error.what();
  }
  return "";
}
inline std::string file_refusal(std::string_view text) {
  Program program;
  return file_refusal(program, testing::TempFolder(), text);
}

}  // namespace tessera::tools
