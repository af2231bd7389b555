// Prompts in files, and their tokens.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tools/data/documents.h"
#include "tools/decoding/generator.h"
#include "tools/io/jsonl.h"
#include "tools/tokenizer/tokenizer.h"

namespace tessera::tools {

struct Prompt {
  std::string text;
  std::vector<std::int32_t> tokens;
};

/// How prompts are read: by whose tokenizer, for which model.
struct PromptReading {
  const Tokenizer* tokenizer = nullptr;   ///< null: bytes are tokens
  bool special = true;                    ///< with the tokens that it puts around a text
  std::int64_t positions = 0, vocab = 0;  ///< of the model
};

/// The lines of the file at `path`. Throws IoError naming the file and a line that is empty, a file
/// without any, of another kind than text, or of over 1 GiB.
std::vector<std::string> read_prompt_file(const std::string& path);

/// `texts` with their tokens. Throws InvalidArgument naming a prompt that has none, more than the
/// model has positions, or one that the model does not have.
std::vector<Prompt> prompts_of(std::vector<std::string> texts, const PromptReading& reading);

/// Those of a file: its lines; or of a .jsonl, which needs a tokenizer, what stands in each line
/// before the last part that is learned as `fields` say, such as the last answer of a chat, and all
/// of a line without one. Throws as read_prompt_file() and prompts_of(), as visit_documents(), and
/// IoError for a line that begins with that part.
std::vector<Prompt> read_prompts(const std::string& path, const DocumentFields& fields,
                                 const PromptReading& reading);

/// What `made` reads like after `prompt`: UTF-8 where the tokenizer is one, otherwise bytes.
std::string text_of(const Prompt& prompt, const Continuation& made, const Tokenizer* tokenizer);

/// {"prompt":"...","text":"...","tokens":[...],"end":"tokens"}
JsonRecord record_of(const Prompt& prompt, std::string_view text, const Continuation& made);

}  // namespace tessera::tools
