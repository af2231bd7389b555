// Token files. Ahead of the file three bytes: is it called .bin, the vocabulary, the sequence.
#include <algorithm>
#include <utility>

#include "tests/fuzz/target.h"
#include "tests/testing/temp_folder.h"
#include "tools/data/token_dataset.h"

namespace tessera::fuzz {

const char* const kTarget = "token_file";

void consume(std::string_view input) {
  static const testing::TempFolder folder;
  if (input.size() < 3) return;
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(input[i]); };
  const std::int64_t seq = 1 + byte(2), vocab = 1 + 16 * byte(1);
  const std::string path = folder.write(byte(0) % 2 == 1 ? "tokens.bin" : "text", input.substr(3));
  const bool keeps_documents = tools::TokenFile(path).keeps_documents();
  for (const auto& [order, packing] : {std::pair{tools::SampleOrder::kSequential, keeps_documents},
                                       {tools::SampleOrder::kShuffle, false}}) {
    const tools::TokenDataset data(tools::TokenFile(path), {.seq = seq,
                                                            .vocab = vocab,
                                                            .val_fraction = 0.1,
                                                            .order = order,
                                                            .seed = 1,
                                                            .packing = packing});
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(seq)), targets(tokens.size());
    std::vector<std::int32_t> positions(packing ? tokens.size() : 0);
    const auto is_token = [&](auto t) { return t >= 0 && t < vocab; };
    const auto check = [&](std::int64_t num_targets) {
      promise(std::ranges::all_of(tokens, is_token), "expected tokens of the vocabulary");
      promise(std::ranges::count_if(targets, is_token) == num_targets &&
                  std::ranges::count(targets, tools::kMasked) == seq - num_targets,
              "expected as many targets as are said, and no others");
      for (std::size_t t = 0; t < positions.size(); ++t) {
        promise(positions[t] == 0 || (t > 0 && positions[t] == positions[t - 1] + 1),
                "expected positions that count on or from 0");
      }
    };
    for (const std::int64_t sample :
         {std::int64_t{0}, data.num_sequences(), std::int64_t{1} << 60}) {
      data.batch(sample, 1, tokens, targets, positions);
      check(data.num_targets(sample, 1));
    }
    data.val_batch(data.num_val_sequences() - 1, 1, tokens, targets, positions);
    check(data.num_val_targets(data.num_val_sequences() - 1, 1));
  }
}

}  // namespace tessera::fuzz
