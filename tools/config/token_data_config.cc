#include "tools/config/token_data_config.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include "tools/config/data_path.h"
#include "tools/config/default_data.h"

namespace tessera::tools {

void TokenDataConfig::add_to(FlagSet& flags) {
  flags.add("data.path", &path,
            {.help = "text file (bytes are tokens) or .bin token file of llm.c, nanoGPT or "
                     "//tools:tokenize; empty: the King James Bible"});
  flags.add("data.format", &format,
            EnumOption<TokenFormat>{
                "of data.path; auto: of a .bin file what its header says or else uint16, and "
                "bytes of any other; uint16, uint32: token ids from the first byte on, "
                "little-endian; bytes: of whatever file",
                {{"auto", TokenFormat::kAuto},
                 {"bytes", TokenFormat::kBytes},
                 {"uint16", TokenFormat::kUInt16},
                 {"uint32", TokenFormat::kUInt32}}});
  flags.add("data.order", &order,
            EnumOption<SampleOrder>{
                "of training sequences",
                {{"shuffle", SampleOrder::kShuffle}, {"sequential", SampleOrder::kSequential}}});
  flags.add("data.val_fraction", &val_fraction,
            {.help = "part of the sequences, at the end, kept for validation; 0: none",
             .min = 0,
             .max = 1,
             .below_max = true});
  flags.add(
      "data.packing", &packing,
      {.help = "a sequence holds several of the documents that data.path keeps apart, each of "
               "which sees itself alone; false: one, and padding"});
}

std::string TokenDataConfig::resolved_path() const {
  return data_path(path, kDefaultText, kHowToGetText);
}

std::optional<TokenFile> TokenDataConfig::file_if_there() const {
  const std::string resolved = resolve_user_path(path);
  std::error_code ignored;
  if (resolved.empty() || !std::filesystem::exists(resolved, ignored)) return std::nullopt;
  return TokenFile(resolved, format);
}

DataFit TokenDataConfig::fit(std::int64_t vocab, const std::string& init_from) const {
  return {.format = format, .vocab = vocab, .init_from = init_from, .packing = packing};
}

TokenDataset TokenDataConfig::dataset(const DataFit& fit, std::int64_t seq,
                                      std::int64_t seed) const {
  TokenFile file(resolved_path(), format);
  check_data_fit(file, fit);
  return {std::move(file),
          {.seq = seq,
           .vocab = fit.vocab,
           .val_fraction = val_fraction,
           .order = order,
           .seed = static_cast<std::uint64_t>(seed),
           .packing = packing}};
}

}  // namespace tessera::tools
