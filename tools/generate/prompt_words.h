// The prompts among the words of a command line.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace tessera::tools {

/// What is left of a command line when its prompts are taken out, --prompt=TEXT or --prompt TEXT,
/// which may be there several times and of any length.
struct PromptWords {
  std::vector<const char*> others;
  std::vector<std::string> prompts;
};
/// Throws InvalidArgument for a --prompt without a text.
PromptWords read_prompt_words(std::span<const char* const> arguments);

}  // namespace tessera::tools
