#include "comm/meta.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "comm/staging.h"
#include "engine/error.h"

namespace tessera::comm {
namespace {

using engine::require;

class MetaGroup final : public ProcessGroup {
 public:
  /// `members`: numbers in the world of the ranks of this group.
  MetaGroup(std::vector<int> members, int rank, MetaOptions options)
      : members_(std::move(members)), rank_(rank), options_(std::move(options)) {
    if (!options_.stages || options_.ranks_per_process == 1) return;
    // As comm/hybrid makes groups.
    std::set<int> processes;
    for (const int member : members_) processes.insert(member / options_.ranks_per_process);
    options_.stages = processes.size() > 1;
    if (processes.size() == members_.size()) options_.ranks_per_process = 1;
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(members_.size()); }
  bool sums_in_rank_order() const override { return options_.sums_in_rank_order; }
  void agree(const Stream& /*stream*/) override {}
  void declare(std::string_view /*what*/) override {}
  void barrier(std::string_view /*label*/) override {}
  std::shared_ptr<const void> pause_deadline() override { return nullptr; }
  void check() override {}
  void abort(std::string_view /*reason*/) noexcept override {}

 private:
  bool is_hybrid() const { return options_.ranks_per_process > 1; }
  int world_rank(int rank) const override { return members_[static_cast<std::size_t>(rank)]; }

  std::unique_ptr<ProcessGroup> make_part(int /*color*/, int /*key*/) override {
    engine::fail("[meta] expected split_by(), got split(): there are no peers to ask (rank {})",
                 rank_);
  }
  std::unique_ptr<ProcessGroup> make_part_by(const std::function<int(int rank)>& color) override {
    std::vector<int> members;
    int rank = 0;
    for (int r = 0; r < size(); ++r) {
      if (color(r) != color(rank_)) continue;
      if (r == rank_) rank = static_cast<int>(members.size());
      members.push_back(world_rank(r));
    }
    return std::make_unique<MetaGroup>(std::move(members), rank, options_);
  }

  std::optional<std::int64_t> own_bytes_sent(const Collective& c) const override {
    if (!options_.stages || is_hybrid()) return std::nullopt;
    return staged_bytes_sent(c, rank_, size(), options_.sums_in_rank_order);
  }

  std::int64_t enqueue(Collective collective, const Stream& stream) override {
    require(stream.device().is_meta, "[meta] expected a stream of a meta device, got '{}' of {}",
            stream.name(), to_string(stream.device()));
    stage(collective, stream);
    stream.launch(collective.work, [] {});
    if (options_.on_collective) options_.on_collective(collective, members_, stream);
    return collective.work.bytes_sent;
  }

  // As Staging::get(): a block a stream, that grows.
  void stage(const Collective& c, const engine::Stream& stream) {
    const std::int64_t nbytes = !options_.stages ? 0
                                : is_hybrid()
                                    ? chain_nbytes(c)
                                    : staging_nbytes(c, size(), options_.sums_in_rank_order);
    if (nbytes == 0) return;
    auto found = std::ranges::find(staging_, stream, &Staging::stream);
    if (found == staging_.end()) found = staging_.insert(found, Staging{stream, {}});
    if (found->bytes.defined() && found->bytes.nbytes() >= nbytes) return;
    found->bytes = {};
    found->bytes = Tensor::empty(c.out.buffer()->memory(), {nbytes}, engine::DType::kU8,
                                 "comm.staging", engine::Category::kCommunication);
  }

  struct Staging {
    engine::Stream stream;
    Tensor bytes;
  };

  const std::vector<int> members_;
  const int rank_;
  MetaOptions options_;  // of this group
  std::vector<Staging> staging_;
};

}  // namespace

std::unique_ptr<ProcessGroup> make_meta_rank(int rank, int size, MetaOptions options) {
  require(rank >= 0 && rank < size, "[meta] expected a rank in [0, {}), got {}", size, rank);
  std::vector<int> members;
  for (int r = 0; r < size; ++r) members.push_back(r);
  return std::make_unique<MetaGroup>(std::move(members), rank, std::move(options));
}

}  // namespace tessera::comm
