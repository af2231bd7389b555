#include "tools/decoding/generator.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>

#include "engine/copy.h"
#include "engine/elementwise.h"
#include "engine/error.h"
#include "tools/models/key_value_cache.h"

namespace tessera::tools {

using engine::Tensor;

std::string_view name_of(End end) {
  constexpr std::array<std::string_view, 4> kNames = {"eos", "tokens", "positions", "stopped"};
  return kNames[static_cast<std::size_t>(end)];
}

namespace {

std::vector<float> floats_of(const Tensor& t) {
  std::vector<float> values(static_cast<std::size_t>(t.numel()));
  engine::dispatch_float(t.dtype(), "logits", [&](auto zero) {
    const auto stored = engine::to_vector<decltype(zero)>(t);
    engine::cast(values.data(), stored.data(), t.numel());
  });
  return values;
}

// A text at work.
struct Text {
  std::size_t number;
  std::vector<std::int32_t> tokens;  // the prompt, and what followed
  std::int64_t count;                // of tokens that follow, at most
  End last_end;                      // why it ends with them
  std::optional<KeyValueCache> cache;
  std::optional<End> end = {};
};

class Texts {
 public:
  Texts(engine::Tape& tape, LanguageModel& model, std::span<const TextRequest> requests,
        const GenerateOptions& options)
      : tape_(tape), model_(model), requests_(requests), options_(options) {}

  void run(const std::function<void(std::size_t text, Continuation made)>& end) {
    std::size_t num_begun = 0;
    while (num_begun < requests_.size() || !active_.empty()) {
      if (num_begun < requests_.size() && std::ssize(active_) < options_.batch) {
        active_.push_back(begin(num_begun++));
        read_alone(*active_.back());
      } else {
        read_all();
      }
      std::erase_if(active_, [&](const std::unique_ptr<Text>& text) {
        if (!text->end) return false;
        const auto before = std::ssize(requests_[text->number].prompt);
        end(text->number, {{text->tokens.begin() + before, text->tokens.end()}, *text->end});
        return true;
      });
    }
  }

 private:
  std::unique_ptr<Text> begin(std::size_t number) const {
    const auto prompt = requests_[number].prompt;
    const std::int64_t before = std::ssize(prompt), positions = model_.max_tokens();
    engine::require(before >= 1 && before <= positions,
                    "[generate] expected a prompt of 1 to {} tokens, got {}", positions, before);
    const std::int64_t most = positions - before + 1;
    const std::int64_t cached = std::min(options_.num_tokens, most);
    const std::int64_t count = options_.slides ? options_.num_tokens : cached;
    auto text = std::make_unique<Text>(
        Text{number,
             {prompt.begin(), prompt.end()},
             count,
             count < options_.num_tokens ? End::kPositions : End::kTokens,
             options_.keeps ? std::optional<KeyValueCache>(before + cached - 1) : std::nullopt});
    if (count <= 0) text->end = End::kTokens;
    return text;
  }

  bool stops() {
    has_stopped_ = has_stopped_ || (options_.goes_on && !options_.goes_on());
    if (!has_stopped_) return false;
    for (const auto& text : active_) text->end = text->end.value_or(End::kStopped);
    return true;
  }

  // A prompt, or as many of its last tokens as the model has positions.
  void read_alone(Text& text) {
    if (text.end || stops()) return;
    const auto context = std::min(std::ssize(text.tokens), model_.max_tokens());
    if (context < std::ssize(text.tokens)) text.cache.reset();
    const Tensor input = Tensor::from<std::int32_t>(
        tape_.memory(), {1, context},
        std::span<const std::int32_t>(text.tokens).last(static_cast<std::size_t>(context)),
        "tokens");
    take(text, floats_of(text.cache ? model_.next_token_logits(tape_, input, *text.cache)
                                    : model_.next_token_logits(tape_, input)));
  }

  // One token more of each text: of those that keep what they have read in one forward.
  void read_all() {
    std::vector<Text*> together;
    for (const auto& text : active_) {
      if (text->cache && std::ssize(text->tokens) <= model_.max_tokens()) {
        together.push_back(text.get());
      } else {
        read_alone(*text);
      }
    }
    if (together.empty() || together.front()->end || stops()) return;
    std::vector<std::int32_t> last;
    std::vector<KeyValueCache*> caches;
    for (Text* text : together) {
      last.push_back(text->tokens.back());
      caches.push_back(&*text->cache);
    }
    const auto count = std::ssize(together);
    const Tensor input = Tensor::from<std::int32_t>(tape_.memory(), {count, 1}, last, "tokens");
    const auto logits_of = [&] {
      if (count == 1) return model_.next_token_logits(tape_, input, *caches.front());
      KeyValueCache batch = KeyValueCache::of_batch(caches);
      return model_.next_token_logits(tape_, input, batch);
    };
    const std::vector<float> all = floats_of(logits_of());
    const std::size_t vocab = all.size() / together.size();
    for (std::size_t i = 0; i < together.size(); ++i) {
      take(*together[i], std::span(all).subspan(i * vocab, vocab));
    }
  }

  void take(Text& text, std::span<const float> logits) {
    const TextRequest& request = requests_[text.number];
    const auto drawable =
        std::min<std::size_t>(static_cast<std::size_t>(options_.vocab), logits.size());
    const std::int32_t token = request.next(logits.first(drawable), std::ssize(text.tokens));
    text.tokens.push_back(token);
    if (options_.eos.contains(token)) {
      text.end = End::kEos;
    } else if (request.use && !request.use(token)) {
      text.end = End::kStopped;
    } else if (std::ssize(text.tokens) == std::ssize(request.prompt) + text.count) {
      text.end = text.last_end;
    }
  }

  engine::Tape& tape_;
  LanguageModel& model_;
  std::span<const TextRequest> requests_;
  const GenerateOptions& options_;
  std::vector<std::unique_ptr<Text>> active_;
  bool has_stopped_ = false;
};

}  // namespace

void generate(engine::Tape& tape, LanguageModel& model, std::span<const TextRequest> requests,
              const GenerateOptions& options,
              const std::function<void(std::size_t text, Continuation made)>& end) {
  Texts(tape, model, requests, options).run(end);
}

}  // namespace tessera::tools
