// TOML files of options.
#include "tests/fuzz/options.h"
#include "tools/cli/toml_file.h"

namespace tessera::fuzz {

const char* const kTarget = "toml";

void consume(std::string_view input) {
  static const testing::TempFolder folder;
  const std::string path = folder.write("config.toml", input);
  tools::visit_toml_file(path, "fuzz", [](const tools::TomlEntry& entry) {
    promise(!entry.shown.empty(), "expected a value that can be shown");
  });
  Options options;
  options.parse({"--config", path});
  write_and_read(options, folder);
}

}  // namespace tessera::fuzz
