// A group behind a link of stated bandwidth and latency, for thread ranks on one machine.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include "comm/forwarding_group.h"
#include "comm/process_group.h"

namespace tessera::tools {

/// What a rank sends goes through one at a time, whichever stream it is from: a token bucket.
class Link {
 public:
  /// 0 bytes a second: as fast as memory.
  explicit Link(double nbytes_per_s, std::chrono::microseconds latency = {})
      : nbytes_per_s_(nbytes_per_s), latency_(latency) {}

  /// Blocks while `nbytes` pass, after what was begun before.
  void pass(double nbytes);

  /// Counts what is to pass, when it is launched: so counts depend on calls alone. `is_edge`: see
  /// edge_nbytes().
  void count(double nbytes, bool is_edge);
  /// Counted so far.
  double nbytes() const;
  /// Of these, what no schedule can hide.
  double edge_nbytes() const;

 private:
  const double nbytes_per_s_;
  const std::chrono::microseconds latency_;
  mutable std::mutex mutex_;
  std::chrono::steady_clock::time_point free_{};
  double nbytes_ = 0, edge_nbytes_ = 0;
};

/// Passes collectives on to `inner` once what a rank sends for them (comm::Traffic) has passed the
/// link. `is_edge(label)`: whether nothing can be done during a collective.
class LinkedGroup : public comm::ForwardingGroup {
 public:
  using IsEdge = std::function<bool(std::string_view label)>;
  LinkedGroup(comm::ProcessGroup& inner, Link& link, IsEdge is_edge)
      : ForwardingGroup(inner), link_(link), is_edge_(std::move(is_edge)) {}
  LinkedGroup(std::unique_ptr<comm::ProcessGroup> inner, Link& link, IsEdge is_edge)
      : ForwardingGroup(std::move(inner)), link_(link), is_edge_(std::move(is_edge)) {}

  std::unique_ptr<comm::ProcessGroup> make_part(int color, int key) override {
    return std::make_unique<LinkedGroup>(inner().split(color, key), link_, is_edge_);
  }

 private:
  void before(const comm::Collective& collective, const engine::Stream& stream) override;

  Link& link_;
  IsEdge is_edge_;
};

}  // namespace tessera::tools
