// The options that make documents of the lines of a .jsonl: --data.* of a training.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tools/cli/flags.h"
#include "tools/data/documents.h"
#include "tools/tokenizer/tokenizer.h"

namespace tessera::tools {

/// What of a document is learned.
enum class LearnedPart { kCompletion, kAll };

struct DocumentConfig {
  std::string field{}, prompt{}, chat_template{};
  LearnedPart loss = LearnedPart::kCompletion;
  std::string end = "auto";

  /// Each by its name with `prefix` before it, such as "data.".
  void add_to(FlagSet& flags, const std::string& prefix);
  /// Whether an option is other than its default.
  bool is_given() const { return *this != DocumentConfig{}; }
  /// Throws InvalidArgument naming the option: a template that is none, or with a prompt.
  DocumentFields fields() const;
  /// What stands at the end of each document. Throws InvalidArgument for what is no token, IoError
  /// where `tokenizer` is to say it and does not.
  std::optional<std::int32_t> end_token(const Tokenizer& tokenizer) const;

  bool operator==(const DocumentConfig&) const = default;
};

}  // namespace tessera::tools
