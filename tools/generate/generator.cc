#include "tools/generate/generator.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "engine/error.h"
#include "tools/models/key_value_cache.h"

namespace tessera::tools {

using engine::Tensor;

std::string_view name_of(End end) {
  constexpr std::array<std::string_view, 4> kNames = {"eos", "tokens", "positions", "stopped"};
  return kNames[static_cast<std::size_t>(end)];
}

Continuation generate(engine::Tape& tape, LanguageModel& model,
                      std::span<const std::int32_t> prompt, std::uint64_t number,
                      const GenerateOptions& options,
                      const std::function<bool(std::int32_t token)>& use) {
  const std::int64_t before = std::ssize(prompt), positions = model.max_tokens();
  engine::require(before >= 1 && before <= positions,
                  "[generate] expected a prompt of 1 to {} tokens, got {}", positions, before);
  const std::int64_t most = positions - before + 1, count = std::min(options.num_tokens, most);
  Continuation made{{}, count < options.num_tokens ? End::kPositions : End::kTokens};
  Sampler sampler(options.sampling, number);
  KeyValueCache cache(before + count - 1);
  std::vector<float> logits;
  std::int32_t last = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto unread = i == 0 ? prompt : std::span<const std::int32_t>(&last, 1);
    const Tensor next = model.next_token_logits(
        tape, Tensor::from<std::int32_t>(tape.memory(), {1, std::ssize(unread)}, unread, "tokens"),
        cache);
    logits.resize(static_cast<std::size_t>(next.numel()));
    next.copy_to_host(logits.data());
    const auto drawable = std::min(options.vocab, next.numel());
    last = sampler.next(std::span(logits).first(static_cast<std::size_t>(drawable)), before + i);
    made.tokens.push_back(last);
    if (options.eos.contains(last)) {
      made.end = End::kEos;
      break;
    }
    if (!use(last)) {
      made.end = End::kStopped;
      break;
    }
  }
  return made;
}

}  // namespace tessera::tools
