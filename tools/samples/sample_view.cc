#include "tools/samples/sample_view.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "engine/io/text.h"
#include "tools/data/token_dataset.h"
#include "tools/data/token_file.h"

namespace tessera::tools {
namespace {

void add(std::vector<TokenRun>& runs, bool is_learned, std::int32_t id) {
  if (runs.empty() || runs.back().is_learned != is_learned) runs.push_back({is_learned, {}});
  runs.back().ids.push_back(id);
}

// Which document of the file the tokens of `view` are of.
void find_document(const TokenFile& file, DocumentView& view) {
  if (!file.keeps_documents()) return;
  const std::vector<std::int64_t>& ends = file.document_ends();
  const auto end = std::ranges::upper_bound(ends, view.first);
  view.document = end - ends.begin();
  const std::int64_t begin = end == ends.begin() ? 0 : *(end - 1);
  view.is_part = begin < view.first || view.last + 1 < *end;
}

std::string document_line(const DocumentView& view) {
  const std::string tokens = fmt::format("tokens {} to {}", engine::with_commas(view.first),
                                         engine::with_commas(view.last));
  if (view.document < 0) return tokens;
  return fmt::format("{}document {}, {}", view.is_part ? "part of " : "",
                     engine::with_commas(view.document), tokens);
}

}  // namespace

SampleView view_of(const TokenMix& data, std::int64_t n, bool is_validation) {
  const auto seq = static_cast<std::size_t>(data.seq());
  std::vector<std::int32_t> tokens(seq), targets(seq), positions(data.packs() ? seq : 0);
  if (is_validation) {
    data.val_batch(n, 1, tokens, targets, positions);
  } else {
    data.batch(n, 1, tokens, targets, positions);
  }
  const auto [source, sample] = is_validation ? data.val_place(n) : data.place(n);
  const TokenDataset& file = data.sources()[source];
  SampleView view{.path = file.file().path()};
  std::size_t at = 0;
  for (const Piece& piece : is_validation ? file.val_pieces(sample) : file.pieces(sample)) {
    DocumentView document{.first = piece.first, .last = piece.first + piece.numel};
    find_document(file.file(), document);
    add(document.runs, /*is_learned=*/false, tokens[at]);  // nothing stands before it
    for (std::int32_t i = 0; i < piece.numel; ++i, ++at) {
      const bool is_learned = targets[at] != kMasked, is_last = i + 1 == piece.numel;
      view.num_learned += is_learned ? 1 : 0;
      if (is_learned || !is_last) {
        add(document.runs, is_learned, is_learned ? targets[at] : tokens[at + 1]);
      }
    }
    view.documents.push_back(std::move(document));
  }
  view.num_tokens = static_cast<std::int64_t>(at);
  view.num_padding = static_cast<std::int64_t>(seq - at);
  return view;
}

std::vector<std::string> lines_of(const SampleView& view, const TextOf& text_of) {
  std::vector<std::string> lines = {
      fmt::format("{}: {} tokens, {} learned, {} of padding", engine::escaped(view.path),
                  engine::with_commas(view.num_tokens), engine::with_commas(view.num_learned),
                  engine::with_commas(view.num_padding))};
  for (const DocumentView& document : view.documents) {
    lines.push_back("  " + document_line(document));
    for (const TokenRun& run : document.runs) {
      std::string text;
      for (const std::int32_t id : run.ids) text += text_of(&id);
      if (&run == &document.runs.back()) text += text_of(nullptr);
      lines.push_back(fmt::format("    {} |{}|", run.is_learned ? "learned" : "read   ",
                                  engine::escaped(text)));
    }
  }
  return lines;
}

}  // namespace tessera::tools
