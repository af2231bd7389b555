// What training reads: one source of tokens, or several with a weight each.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/tensor.h"
#include "tools/data/mix_order.h"
#include "tools/data/token_dataset.h"

namespace tessera::tools {

/// Sample n is a sample of the source that MixOrder says, so each source goes through epochs of its
/// own, and a run is resumed, and dealt to ranks, by the number of a sample alone. Of one source a
/// sample is what it is there. Weights are shares of sequences.
class TokenMix {
 public:
  /// `sources`: of one seq, all with packing or none, of files that check_mix_fit() takes together.
  /// `weights`: as many. Throws InvalidArgument where seq, packing or numbers differ, and as
  /// MixOrder does.
  TokenMix(std::vector<TokenDataset> sources, std::span<const double> weights, std::uint64_t seed);

  const std::vector<TokenDataset>& sources() const { return sources_; }
  /// Samples of each source in MixOrder::kBlock.
  const std::vector<std::int64_t>& quotas() const { return order_.quotas(); }
  /// Of all samples, those of a source, in (0, 1].
  double share(std::size_t source) const {
    return static_cast<double>(quotas()[source]) / double{MixOrder::kBlock};
  }
  std::int64_t seq() const { return sources_.front().seq(); }
  bool is_bytes() const { return sources_.front().file().is_bytes(); }
  bool packs() const { return sources_.front().packs(); }
  bool keeps_documents() const;  ///< some source does
  std::int64_t max_possible_token() const;
  std::int64_t num_sequences() const;      ///< of all sources
  std::int64_t mean_length() const;        ///< of all, by their shares
  std::int64_t num_val_sequences() const;  ///< all of one source, then of the next
  /// The files, as people know them: "a.bin", "70.0% a.bin, 30.0% b.bin".
  std::string text() const;

  /// As those of TokenDataset.
  void batch(std::int64_t first_sample, std::int64_t batch, std::span<std::int32_t> tokens,
             std::span<std::int32_t> targets, std::span<std::int32_t> positions = {}) const;
  void val_batch(std::int64_t first, std::int64_t batch, std::span<std::int32_t> tokens,
                 std::span<std::int32_t> targets, std::span<std::int32_t> positions = {}) const;
  void batch(std::int64_t first_sample, std::int64_t batch,
             std::span<const engine::Tensor> host) const;
  void val_batch(std::int64_t first, std::int64_t batch,
                 std::span<const engine::Tensor> host) const;
  std::int64_t num_targets(std::int64_t first_sample, std::int64_t batch) const;
  std::int64_t num_val_targets(std::int64_t first, std::int64_t batch) const;

  /// Of which source a sample is, and which one there.
  MixOrder::Place place(std::int64_t sample) const { return order_.place(sample); }
  /// Of a validation sequence.
  MixOrder::Place val_place(std::int64_t i) const;

 private:
  std::vector<TokenDataset> sources_;
  MixOrder order_;
};

/// What the data of a mix are: `digests`, by digest_of(), of its sources, and their quotas. Of one
/// source what that is.
std::string digest_of_mix(std::span<const std::string> digests,
                          std::span<const std::int64_t> quotas);

}  // namespace tessera::tools
