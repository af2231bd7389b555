#include "tools/samples/sample_view.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "tests/testing/temp_folder.h"
#include "tests/tools/testing/marked.h"
#include "tools/data/token_dataset.h"
#include "tools/data/token_file.h"
#include "tools/data/token_mix.h"
#include "tools/data/token_writer.h"

namespace tessera::tools {
namespace {

using Ids = std::vector<std::int32_t>;
using testing::TempFolder;

constexpr std::int64_t kVocab = 1 << 20;

class SampleViewTest : public ::testing::Test {
 protected:
  SampleViewTest() {
    TokenWriter apart(kVocab, /*keeps_documents=*/true), plain(kVocab);
    const std::pair<Ids, int> documents[] = {{{1, 2, 3, 4, 5}, 2},
                                             {{11, 12, 13, 14, 15, 16, 17, 18, 19, 20}, 0},
                                             {{21, 22}, 0},
                                             {{31, 32, 33}, 1}};
    for (const auto& [ids, num_not_learned] : documents)
      apart.add_document(testing::marked(ids, num_not_learned));
    Ids ids(41);
    std::iota(ids.begin(), ids.end(), 100);
    plain.add(ids);
    apart.write(folder_ / "apart.bin");
    plain.write(folder_ / "plain.bin");
  }

  TokenMix mix(const std::vector<std::string>& names, const TokenDatasetOptions& options) const {
    std::vector<TokenDataset> sources;
    for (const std::string& name : names) sources.emplace_back(TokenFile(folder_ / name), options);
    return {std::move(sources), std::vector<double>(names.size(), 1), 3};
  }

  const TempFolder folder_;
};

std::string ids_of(const std::int32_t* id) {
  return id == nullptr ? "." : std::to_string(*id) + " ";
}

TEST_F(SampleViewTest, ShowsDocumentsAndWhatIsLearnedOfThem) {
  const TokenMix data = mix({"apart.bin"}, {.seq = 8, .vocab = kVocab, .packing = true});
  ASSERT_EQ(data.num_sequences(), 2);
  EXPECT_EQ(lines_of(view_of(data, 0, false), ids_of),
            (std::vector<std::string>{
                (folder_ / "apart.bin") + ": 8 tokens, 7 learned, 0 of padding",
                "  document 0, tokens 0 to 4", "    read    |1 2 |", "    learned |3 4 5 .|",
                "  part of document 1, tokens 13 to 14", "    read    |19 |", "    learned |20 .|",
                "  document 2, tokens 15 to 16", "    read    |21 |", "    learned |22 .|",
                "  document 3, tokens 17 to 19", "    read    |31 |", "    learned |32 33 .|"}));
}

TEST_F(SampleViewTest, IsTheBatchOfTheModel) {
  for (const bool packing : {false, true}) {
    for (const auto order : {SampleOrder::kSequential, SampleOrder::kShuffle}) {
      const TokenMix data =
          mix({"apart.bin", "plain.bin"},
              {.seq = 8, .vocab = kVocab, .val_fraction = 0.3, .order = order, .packing = packing});
      for (std::int64_t n = 0; n < 30; ++n) {
        for (const bool is_validation : {false, true}) {
          if (is_validation && n >= data.num_val_sequences()) continue;
          Ids tokens(8), targets(8), positions(packing ? 8 : 0);
          if (is_validation)
            data.val_batch(n, 1, tokens, targets, positions);
          else
            data.batch(n, 1, tokens, targets, positions);
          const SampleView view = view_of(data, n, is_validation);
          // The tensors once more, from what is shown.
          Ids shown_tokens, shown_targets, shown_positions;
          for (const DocumentView& document : view.documents) {
            Ids ids;
            std::vector<bool> is_learned;
            for (const TokenRun& run : document.runs) {
              ids.insert(ids.end(), run.ids.begin(), run.ids.end());
              is_learned.insert(is_learned.end(), run.ids.size(), run.is_learned);
            }
            const auto numel = static_cast<std::size_t>(document.last - document.first);
            for (std::size_t i = 0; i < numel; ++i) {
              shown_tokens.push_back(ids.at(i));
              const bool learned = i + 1 < ids.size() && is_learned[i + 1];
              shown_targets.push_back(learned ? ids[i + 1] : kMasked);
              if (packing) shown_positions.push_back(static_cast<std::int32_t>(i));
            }
          }
          EXPECT_EQ(std::ssize(shown_tokens), view.num_tokens);
          EXPECT_EQ(view.num_padding, 8 - view.num_tokens);
          for (std::int32_t i = 0; i < view.num_padding; ++i) {
            shown_tokens.push_back(0);
            shown_targets.push_back(kMasked);
            if (packing) shown_positions.push_back(i);
          }
          EXPECT_EQ(shown_tokens, tokens);
          EXPECT_EQ(shown_targets, targets);
          EXPECT_EQ(shown_positions, positions);
          EXPECT_EQ(view.num_learned,
                    is_validation ? data.num_val_targets(n, 1) : data.num_targets(n, 1));
        }
      }
    }
  }
}

TEST_F(SampleViewTest, OfAFileWithoutDocumentsShowsItsTokens) {
  const TokenMix data = mix({"plain.bin"}, {.seq = 4, .vocab = kVocab});
  EXPECT_EQ(lines_of(view_of(data, 2, false), ids_of),
            (std::vector<std::string>{
                (folder_ / "plain.bin") + ": 4 tokens, 4 learned, 0 of padding", "  tokens 8 to 12",
                "    read    |108 |", "    learned |109 110 111 112 .|"}));
}

}  // namespace
}  // namespace tessera::tools
