#include "tools/generate/prompts.h"

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "engine/error.h"
#include "engine/io/file.h"
#include "tools/io/file_kind.h"

namespace tessera::tools {

using engine::IoError;
using engine::require;

PromptWords read_prompt_words(std::span<const char* const> arguments) {
  constexpr std::string_view kFlag = "--prompt";
  PromptWords words;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view word = arguments[i];
    if (word.starts_with("--prompt=")) {
      words.prompts.emplace_back(word.substr(kFlag.size() + 1));
    } else if (word == kFlag) {
      require(i + 1 < arguments.size(), "[generate] expected a text, got no value (prompt)");
      words.prompts.emplace_back(arguments[++i]);
    } else {
      words.others.push_back(arguments[i]);
    }
  }
  return words;
}

std::vector<std::string> read_prompt_file(const std::string& path) {
  constexpr std::int64_t kMaxNbytes = std::int64_t{1} << 30;
  const std::string text = engine::read_text_file(path, kMaxNbytes);
  const FileKind* kind = file_kind(std::string_view(text).substr(0, kFileKindNbytes));
  if (kind != nullptr && !kind->is_text()) {
    engine::fail<IoError>("[generate] expected prompts, got {}{} ({})", kind->name,
                          kind->to_unpack(), path);
  }
  std::vector<std::string> prompts;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\n', begin);
    std::string& line = prompts.emplace_back(text.substr(begin, end - begin));
    if (line.ends_with('\r')) line.pop_back();
    require<IoError>(!line.empty(), "[generate] expected a prompt, got an empty line ({}:{})", path,
                     prompts.size());
    begin = end == std::string::npos ? text.size() : end + 1;
  }
  require<IoError>(!prompts.empty(), "[generate] expected prompts, got an empty file ({})", path);
  return prompts;
}

}  // namespace tessera::tools
