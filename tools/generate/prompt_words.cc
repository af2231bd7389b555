#include "tools/generate/prompt_words.h"

#include <cstddef>
#include <string_view>

#include "engine/error.h"

namespace tessera::tools {

PromptWords read_prompt_words(std::span<const char* const> arguments) {
  constexpr std::string_view kFlag = "--prompt";
  PromptWords words;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view word = arguments[i];
    if (word.starts_with("--prompt=")) {
      words.prompts.emplace_back(word.substr(kFlag.size() + 1));
    } else if (word == kFlag) {
      engine::require(i + 1 < arguments.size(),
                      "[generate] expected a text, got no value (prompt)");
      words.prompts.emplace_back(arguments[++i]);
    } else {
      words.others.push_back(arguments[i]);
    }
  }
  return words;
}

}  // namespace tessera::tools
