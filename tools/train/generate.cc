#include "tools/train/generate.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <string_view>

#include "engine/io/text.h"
#include "engine/philox.h"

namespace tessera::tools {

using engine::Tensor;

std::vector<std::int32_t> generate(Trainer& trainer, LanguageModel& model,
                                   std::vector<std::int32_t> tokens, std::int64_t num_tokens,
                                   std::int64_t vocab, std::uint64_t seed) {
  constexpr float kTemperature = 0.8f;
  constexpr std::size_t kTopK = 40;
  const engine::RandomStream random{seed, engine::fnv1a("sample")};
  constexpr std::int64_t kTokensPerLook = 16;
  for (std::int64_t i = 0; i < num_tokens; ++i) {
    if (i % kTokensPerLook == 0 && trainer.stops()) break;
    const auto context = std::min(static_cast<std::int64_t>(tokens.size()), model.max_tokens());
    const Tensor input = Tensor::from<std::int32_t>(
        trainer.tape().memory(), {1, context},
        std::span<const std::int32_t>(tokens).last(static_cast<std::size_t>(context)), "tokens");
    const Tensor logits = model.next_token_logits(trainer.tape(), input);
    const std::vector<float> scores = to_floats(logits);
    trainer.world().check();
    std::vector<std::int32_t> order(std::min(scores.size(), static_cast<std::size_t>(vocab)));
    std::iota(order.begin(), order.end(), 0);
    const std::size_t k = std::min(kTopK, order.size());
    std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(k), order.end(),
                      [&](std::int32_t a, std::int32_t b) {
                        const float sa = scores[static_cast<std::size_t>(a)];
                        const float sb = scores[static_cast<std::size_t>(b)];
                        return sa != sb ? sa > sb : a < b;
                      });
    std::vector<double> weights(k);
    const float top = scores[static_cast<std::size_t>(order[0])];
    for (std::size_t j = 0; j < k; ++j) {
      weights[j] = std::exp((scores[static_cast<std::size_t>(order[j])] - top) / kTemperature);
    }
    double pick = random.uniform(static_cast<std::uint64_t>(i)) *
                  std::accumulate(weights.begin(), weights.end(), 0.0);
    std::size_t chosen = 0;
    while (chosen + 1 < k && pick >= weights[chosen]) pick -= weights[chosen++];
    tokens.push_back(order[chosen]);
  }
  return tokens;
}

std::string printable(std::string_view bytes) {
  std::string_view rest = engine::without_cut_character(bytes);
  std::string text;
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find_first_of("\n\t"), rest.size());
    text += engine::escaped(rest.substr(0, end));
    if (end < rest.size()) text += rest[end];
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return text;
}

}  // namespace tessera::tools
