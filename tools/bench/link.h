// A group behind a link of stated bandwidth and latency, for thread ranks on one machine.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string_view>

#include "comm/process_group.h"

namespace tessera::tools {

/// What a rank sends goes through one at a time, whichever stream it is from: a token bucket.
class Link {
 public:
  /// 0 bytes a second: as fast as memory, but counted.
  explicit Link(double nbytes_per_s, std::chrono::microseconds latency = {})
      : nbytes_per_s_(nbytes_per_s), latency_(latency) {}

  /// Blocks while `nbytes` pass, behind what was begun before. `is_edge`: see edge_nbytes().
  void pass(double nbytes, bool is_edge);

  double nbytes_per_s() const { return nbytes_per_s_; }
  /// Passed so far.
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

/// Passes collectives on to `inner` once what a ring sends for them has passed the link: of a whole
/// of n bytes on N ranks n (N - 1) / N, of an all-reduce twice that. `is_edge(label)`: whether
/// nothing can be done beside a collective.
class LinkedGroup : public comm::ProcessGroup {
 public:
  using IsEdge = std::function<bool(std::string_view label)>;
  LinkedGroup(comm::ProcessGroup& inner, Link& link, IsEdge is_edge)
      : inner_(inner), link_(link), is_edge_(std::move(is_edge)) {}
  LinkedGroup(std::unique_ptr<comm::ProcessGroup> inner, Link& link, IsEdge is_edge)
      : owned_(std::move(inner)), inner_(*owned_), link_(link), is_edge_(std::move(is_edge)) {}

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  bool sums_in_rank_order() const override { return inner_.sums_in_rank_order(); }
  void agree(const engine::Stream& stream) override { inner_.agree(stream); }
  void declare(std::string_view what) override { inner_.declare(what); }
  void barrier(std::string_view label) override { inner_.barrier(label); }
  std::unique_ptr<comm::ProcessGroup> split(int color, int key) override {
    return std::make_unique<LinkedGroup>(inner_.split(color, key), link_, is_edge_);
  }
  std::shared_ptr<const void> pause_deadline() override { return inner_.pause_deadline(); }
  void check() override { inner_.check(); }
  void abort(std::string_view reason) noexcept override { inner_.abort(reason); }

 private:
  int world_rank(int rank) const override { return rank; }
  void enqueue(comm::Collective collective, const engine::Stream& stream) override;

  std::unique_ptr<comm::ProcessGroup> owned_;
  comm::ProcessGroup& inner_;
  Link& link_;
  IsEdge is_edge_;
};

}  // namespace tessera::tools
