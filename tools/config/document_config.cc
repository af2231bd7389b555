#include "tools/config/document_config.h"

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
  flags.add(prefix + "end", &end,
            {.help = "token after each document, such as <|endoftext|>; none; auto: what the "
                     "tokenizer's files call eos_token, none with " +
                     prefix + "template"});
}

DocumentFields DocumentConfig::fields() const {
  DocumentFields fields{.prompt = prompt, .learns_all = loss == LearnedPart::kAll};
  if (!chat_template.empty()) {
    require(prompt.empty(),
            "[config] expected a template or a prompt, got both, {} and {} (template)",
            engine::excerpt(chat_template), engine::excerpt(prompt));
    fields.chat.emplace(chat_template);
  }
  fields.text = !field.empty() ? field : fields.chat ? "messages" : "text";
  return fields;
}

std::optional<std::int32_t> DocumentConfig::end_token(const Tokenizer& tokenizer) const {
  if (end.empty() || end == "none" || (end == "auto" && !chat_template.empty())) return {};
  if (end == "auto") {
    require<engine::IoError>(tokenizer.eos().has_value(),
                             "[config] expected an eos_token in tokenizer_config.json to put after "
                             "each document, got none: give the token, or none (end)");
    return tokenizer.eos();
  }
  const std::optional<std::int32_t> token = tokenizer.id_of(end);
  require(token.has_value(), "[config] expected a token of the tokenizer, got {} (end)",
          engine::excerpt(end));
  return token;
}

}  // namespace tessera::tools
