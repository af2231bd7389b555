// A group that passes everything on to another: the base of those that watch or delay what is
// called.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "comm/process_group.h"

namespace tessera::comm {

/// make_part() is left to whoever derives: what it returns should do as the group itself does.
class ForwardingGroup : public ProcessGroup {
 public:
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  bool sums_in_rank_order() const override { return inner_.sums_in_rank_order(); }
  void agree(const Stream& stream) override { inner_.agree(stream); }
  void declare(std::string_view what) override { inner_.declare(what); }
  void barrier(std::string_view label) override { inner_.barrier(label); }
  std::shared_ptr<const void> pause_deadline() override { return inner_.pause_deadline(); }
  void check() override { inner_.check(); }
  void abort(std::string_view reason) noexcept override { inner_.abort(reason); }

 protected:
  /// `inner` outlives this.
  explicit ForwardingGroup(ProcessGroup& inner) : inner_(inner) {}
  explicit ForwardingGroup(std::unique_ptr<ProcessGroup> inner)
      : owned_(std::move(inner)), inner_(*owned_) {}

  ProcessGroup& inner() { return inner_; }
  /// Called with each collective before it is passed on.
  virtual void before(const Collective& collective, const Stream& stream) = 0;

 private:
  int world_rank(int rank) const override { return rank; }

  std::int64_t enqueue(Collective c, const Stream& stream) override {
    before(c, stream);
    const std::int64_t sent = inner_.traffic().bytes_sent;
    pass_on(c, stream);
    return inner_.traffic().bytes_sent - sent;
  }

  void pass_on(const Collective& c, const Stream& stream) {
    const std::string& label = c.work.detail;
    switch (c.op) {
      case Collective::Op::kAllGather:
        return inner_.all_gather(c.in, c.out, stream, label);
      case Collective::Op::kReduceScatter:
        return inner_.reduce_scatter(c.in, c.out, c.accumulate, stream, label);
      case Collective::Op::kAllReduce:
        return inner_.all_reduce(c.in, c.out, c.accumulate, stream, label);
      case Collective::Op::kBroadcast:
        return inner_.broadcast(c.in, c.root, stream, label);
      case Collective::Op::kAllToAll:
        return inner_.all_to_all(c.in, c.out, stream, label);
    }
  }

  const std::unique_ptr<ProcessGroup> owned_;
  ProcessGroup& inner_;
};

}  // namespace tessera::comm
