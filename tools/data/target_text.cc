#include "tools/data/target_text.h"

#include <cstddef>
#include <iterator>
#include <vector>

#include "tools/data/token_file.h"

namespace tessera::tools {

std::int64_t num_val_nbytes(const TokenMix& data, const Tokenizer& tokenizer) {
  const auto seq = static_cast<std::size_t>(data.seq());
  std::vector<std::int32_t> tokens(seq), targets(seq), positions(data.packs() ? seq : 0), text;
  std::int64_t nbytes = 0;
  const auto end_text = [&] {
    nbytes += std::ssize(tokenizer.decode(text));
    text.clear();
  };
  for (std::int64_t i = 0; i < data.num_val_sequences(); ++i) {
    data.val_batch(i, 1, tokens, targets, positions);
    for (const std::int32_t target : targets) {
      if (target != kMasked) {
        text.push_back(target);
      } else if (!text.empty()) {
        end_text();
      }
    }
    end_text();
  }
  return nbytes;
}

}  // namespace tessera::tools
