#include "tools/config/data/token_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <system_error>
#include <utility>

#include "engine/error.h"
#include "tools/cli/flags.h"
#include "tools/data/mix_order.h"

namespace tessera::tools {

using engine::require;

std::vector<TokenSource> parse_mix(const std::string& mix) {
  std::vector<TokenSource> sources;
  std::vector<double> weights;
  for (std::size_t begin = 0; begin <= mix.size();) {
    const std::size_t end = std::min(mix.find(',', begin), mix.size());
    const std::string part = mix.substr(begin, end - begin);
    begin = end + 1;
    const std::size_t colon = part.rfind(':');
    TokenSource source;
    const char* const last = part.data() + part.size();
    bool is_source = colon != std::string::npos && colon > 0;
    if (is_source) {
      source.path = resolve_user_path(part.substr(0, colon));
      const auto [at, error] = std::from_chars(part.data() + colon + 1, last, source.weight);
      is_source = error == std::errc() && at == last && std::isfinite(source.weight);
    }
    require(is_source && source.weight > 0,
            "[config] expected FILE:WEIGHT with a weight above 0, and commas between them, got "
            "'{}' in '{}' (data.mix)",
            part, mix);
    require(std::ranges::find(sources, source.path, &TokenSource::path) == sources.end(),
            "[config] expected a file once, got {} twice (data.mix)", source.path);
    weights.push_back(source.weight);
    sources.push_back(std::move(source));
  }
  static_cast<void>(MixOrder(weights, 0));  // or throws
  return sources;
}

std::string mix_option(const std::vector<TokenSource>& sources) {
  std::string text;
  for (const TokenSource& source : sources)
    text += fmt::format("{}{}:{}", text.empty() ? "" : ",", source.path, source.weight);
  return text;
}

}  // namespace tessera::tools
