#include "tools/io/nbytes.h"

#include <array>
#include <charconv>
#include <system_error>
#include <utility>

#include "engine/error.h"

namespace tessera::tools {

std::int64_t parse_nbytes(std::string_view text, std::string_view option) {
  constexpr std::array<std::pair<std::string_view, double>, 10> kUnits = {{{"KiB", 0x1p10},
                                                                           {"MiB", 0x1p20},
                                                                           {"GiB", 0x1p30},
                                                                           {"TiB", 0x1p40},
                                                                           {"kB", 1e3},
                                                                           {"MB", 1e6},
                                                                           {"GB", 1e9},
                                                                           {"TB", 1e12},
                                                                           {"B", 1},
                                                                           {"", 1}}};
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  std::string_view unit(rest, static_cast<std::size_t>(end - rest));
  if (unit.starts_with(' ')) unit.remove_prefix(1);
  for (const auto& [name, factor] : kUnits) {
    const double nbytes = number * factor;
    if (error == std::errc() && unit == name && nbytes >= 1 && nbytes < 0x1p62) {
      return static_cast<std::int64_t>(nbytes);
    }
  }
  engine::fail("[config] expected a size such as 40GiB or 700MB, got '{}' ({})", text, option);
}

}  // namespace tessera::tools
