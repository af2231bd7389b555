#include "tools/config/data/input_option.h"

#include <filesystem>
#include <system_error>
#include <vector>

#include "tools/cli/flags.h"
#include "tools/config/data/token_source.h"

namespace tessera::tools {
namespace {

constexpr std::string_view kMix = "data.mix";

std::string resolved(const std::string& path) {
  std::error_code error;
  const auto whole = std::filesystem::weakly_canonical(resolve_user_path(path), error);
  return error ? resolve_user_path(path) : whole.string();
}

}  // namespace

bool names_inputs(std::string_view name) {
  return name == kMix || name == "data.path" || name == "data.tokenizer" || name.ends_with(".from");
}

std::string resolved_inputs(std::string_view name, const std::string& text) {
  if (text.empty()) return text;
  if (name != kMix) return resolved(text);
  std::vector<TokenSource> sources = parse_mix(text);
  for (TokenSource& source : sources) source.path = resolved(source.path);
  return mix_option(sources);
}

}  // namespace tessera::tools
