#include "tools/config/data/document_config.h"

#include "engine/error.h"
#include "engine/io/text.h"

namespace tessera::tools {

using engine::require;

void DocumentConfig::add_to(FlagSet& flags, const std::string& prefix) {
  flags.add(prefix + "field", &field,
            {.help = "key of the text in each line of a .jsonl, or with " + prefix +
                     "template of its list of messages; empty: text, or messages"});
  flags.add(prefix + "prompt", &prompt,
            {.help = "key of a text in each line of a .jsonl that comes before that of " + prefix +
                     "field and is read only; empty: none"});
  flags.add(prefix + "template", &chat_template,
            {.help = "each line of a .jsonl has messages with role and content, and this is the "
                     "text of one: with {role} and {content}, and \\n for a line break; empty: "
                     "lines have texts"});
  flags.add(prefix + "loss", &loss,
            EnumOption<LearnedPart>{
                "what is learned of a line of a .jsonl; completion: messages of the assistant, or "
                "what comes after the prompt; all: the others as well",
                {{"completion", LearnedPart::kCompletion}, {"all", LearnedPart::kAll}}});
  flags.add(
      prefix + "special", &special,
      {.help = "with the tokens that the tokenizer puts around a text, such as a first one, around "
               "each document"});
  flags.add(prefix + "end", &end,
            {.help = "token after each document, such as <|endoftext|>; none; auto: what the "
                     "tokenizer's files call eos_token, and none with " +
                     prefix + "template, or where the tokenizer puts it there itself" +
                     (prefix.empty() ? "" : ", or after a text that is all of its file")});
}

bool DocumentConfig::reads_lines() const {
  DocumentConfig lines = *this;
  lines.special = DocumentConfig{}.special;
  lines.end = DocumentConfig{}.end;
  return lines != DocumentConfig{};
}

bool DocumentConfig::is_around() const {
  return special != DocumentConfig{}.special || end != DocumentConfig{}.end;
}

DocumentFields DocumentConfig::fields(std::string_view prefix) const {
  DocumentFields fields{.prompt = prompt, .learns_all = loss == LearnedPart::kAll};
  if (!chat_template.empty()) {
    require(prompt.empty(),
            "[config] expected a template or a prompt, got both, {} and {} ({}template)",
            engine::excerpt(chat_template), engine::excerpt(prompt), prefix);
    fields.chat.emplace(chat_template, std::string(prefix) + "template");
  }
  fields.text = !field.empty() ? field : fields.chat ? "messages" : "text";
  require(prompt != fields.text,
          "[config] expected a prompt at another key than the text, got {} for both ({}prompt)",
          engine::excerpt(prompt), prefix);
  require(!fields.learns_all || !prompt.empty() || fields.chat,
          "[config] expected a prompt or a template with loss=all, as texts alone are learned as "
          "a whole, got neither ({}loss)",
          prefix);
  return fields;
}

DocumentEnds DocumentConfig::ends(const Tokenizer& tokenizer, std::string_view prefix) const {
  DocumentEnds ends{.special = special};
  if (end.empty() || end == "none" || (end == "auto" && !chat_template.empty())) return ends;
  if (end != "auto") {
    ends.end = tokenizer.id_of(end);
    require(ends.end.has_value(), "[config] expected a token of the tokenizer, got {} ({}end)",
            engine::excerpt(end), prefix);
    return ends;
  }
  require<engine::IoError>(tokenizer.eos().has_value(),
                           "[config] expected an eos_token in tokenizer_config.json to put after "
                           "each document, got none: give the token, or none ({}end)",
                           prefix);
  const bool is_there =
      special && !tokenizer.after().empty() && tokenizer.after().back() == *tokenizer.eos();
  if (!is_there) ends.end = tokenizer.eos();
  return ends;
}

DocumentEnds DocumentConfig::ends_of_text(const Tokenizer& tokenizer,
                                          std::string_view prefix) const {
  return end == "auto" ? DocumentEnds{.special = special} : ends(tokenizer, prefix);
}

}  // namespace tessera::tools
