#include "comm/messages/message_group.h"

#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/flight_call.h"
#include "comm/messages/collectives.h"
#include "comm/messages/message_rank.h"
#include "comm/messages/messages.h"
#include "comm/staging.h"

namespace tessera::comm {
namespace {

class MessageGroup final : public ProcessGroup {
 public:
  explicit MessageGroup(std::shared_ptr<MessageRank> self) : self_(std::move(self)) {}

  int rank() const override { return self_->rank(); }
  int size() const override { return self_->size(); }
  bool sums_in_rank_order() const override { return true; }
  void agree(const Stream& /*stream*/) override {}
  void declare(std::string_view what) override { self_->declare(what); }
  void barrier(std::string_view label) override { self_->barrier(label); }
  std::shared_ptr<const void> pause_deadline() override {
    const auto& pause = self_->shared()->peers.pause;
    return pause ? pause() : self_->world().pause_deadline();
  }
  void check() override { self_->world().check(); }
  void abort(std::string_view reason) noexcept override {
    self_->world().abort_by(world_rank(rank()), reason);
  }

 private:
  // What a call uses until its last message is done. That may be long after it has failed, when
  // buffers have been released.
  struct Held {
    Collective collective;
    Tensor staging;
    std::shared_ptr<const void> in_slot, out_slot;
  };

  int world_rank(int rank) const override { return self_->world_rank(rank); }

  std::unique_ptr<ProcessGroup> make_part(int color, int key) override {
    MessageRank::Part part = self_->split(color, key);
    return make_message_group(std::make_shared<MessageRank>(
        self_->shared(), std::move(part.name), std::move(part.processes), self_->world().flight()));
  }

  std::optional<std::int64_t> own_bytes_sent(const Collective& c) const override {
    return staged_bytes_sent(c, rank(), size(), /*canonical=*/true);
  }

  std::int64_t enqueue(Collective collective, const Stream& stream) override {
    check_on_host(collective, stream, world_rank(rank()));
    const std::int64_t sent = collective.work.bytes_sent;
    engine::Work work = std::move(collective.work);
    const auto held = std::make_shared<Held>();
    if (const std::int64_t nbytes = staging_nbytes(collective, size(), /*canonical=*/true)) {
      held->staging = staging_.get(nbytes, collective.out.buffer()->memory(), stream);
    }
    held->in_slot = collective.in.buffer()->slot();
    held->out_slot = collective.out.buffer()->slot();
    held->collective = std::move(collective);
    held->collective.work.name = work.name;
    held->collective.work.detail = work.detail;
    const Call call =
        self_->next_call(flight_call(held->collective), std::move(held->collective.text));
    stream.launch(std::move(work), [self = self_, call, held] {
      Messages messages(*self, call, held);
      carry_out(held->collective, held->staging, self->rank(), self->size(), messages);
    });
    return sent;
  }

  const std::shared_ptr<MessageRank> self_;
  Staging staging_{"comm.staging"};
};

}  // namespace

std::unique_ptr<ProcessGroup> make_message_group(std::shared_ptr<MessageRank> rank) {
  return std::make_unique<MessageGroup>(std::move(rank));
}

}  // namespace tessera::comm
