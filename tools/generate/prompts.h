// The prompts that a person gives: words of the command line, or lines of a file.
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

/// The lines of the file at `path`. Throws IoError naming the file and a line that is empty, a file
/// without any, of another kind than text, or of over 1 GiB.
std::vector<std::string> read_prompt_file(const std::string& path);

}  // namespace tessera::tools
