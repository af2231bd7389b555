// The options that make documents of texts and of the lines of a .jsonl: --data.* of a training.
#pragma once

#include <string>
#include <string_view>

#include "tools/cli/flags.h"
#include "tools/data/document_encoder.h"
#include "tools/data/documents.h"
#include "tools/tokenizer/tokenizer.h"

namespace tessera::tools {

/// What of a document is learned.
enum class LearnedPart { kCompletion, kAll };

struct DocumentConfig {
  std::string field{}, prompt{}, chat_template{};
  LearnedPart loss = LearnedPart::kCompletion;
  bool special = true;
  std::string end = "auto";

  /// Each option has its name with `prefix` before it, such as "data.", here and in errors.
  void add_to(FlagSet& flags, const std::string& prefix);
  /// Whether an option says what of a line is read, or learned, other than by default.
  bool reads_lines() const;
  /// Whether an option says what stands around each text, other than by default.
  bool is_around() const;
  /// Throws InvalidArgument naming the option: a template that is none, or with a prompt; a prompt
  /// at the key of the text; loss=all where all is learned.
  DocumentFields fields(std::string_view prefix) const;
  /// What stands around each document. Throws InvalidArgument for an end that is no token, IoError
  /// where `tokenizer` is to say it and does not.
  DocumentEnds ends(const Tokenizer& tokenizer, std::string_view prefix) const;
  /// As ends(), of a text that nothing comes after: end=auto puts nothing there.
  DocumentEnds ends_of_text(const Tokenizer& tokenizer, std::string_view prefix) const;

  bool operator==(const DocumentConfig&) const = default;
};

}  // namespace tessera::tools
