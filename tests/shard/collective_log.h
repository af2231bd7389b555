// The collectives that a rank calls, in the order in which it calls them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/process_group.h"

namespace tessera::testing {

/// What one rank called.
class CollectiveLog {
 public:
  struct Record {
    std::string text;  ///< "all_gather h.0 forward"
    comm::Collective::Op op;
    int num_ranks;
    std::int64_t in_nbytes, out_nbytes;
    const comm::ProcessGroup* group;
    std::string stream;
  };

  void add(Record record) { records_.push_back(std::move(record)); }
  /// What was called since the last call of take() or records().
  std::vector<Record> records() { return std::exchange(records_, {}); }
  /// The same as text.
  std::vector<std::string> take() {
    std::vector<std::string> lines;
    for (const Record& record : records()) lines.push_back(record.text);
    return lines;
  }

 private:
  std::vector<Record> records_;
};

/// Passes on what is called on it, and on what is split from it, and logs it.
class LoggedGroup : public comm::ProcessGroup {
 public:
  LoggedGroup(comm::ProcessGroup& inner, CollectiveLog& log) : inner_(inner), log_(log) {}
  LoggedGroup(std::unique_ptr<comm::ProcessGroup> inner, CollectiveLog& log)
      : owned_(std::move(inner)), inner_(*owned_), log_(log) {}

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  bool sums_in_rank_order() const override { return inner_.sums_in_rank_order(); }
  void agree(const engine::Stream& stream) override { inner_.agree(stream); }
  void declare(std::string_view what) override { inner_.declare(what); }
  void barrier(std::string_view label) override { inner_.barrier(label); }
  std::unique_ptr<comm::ProcessGroup> split(int color, int key) override {
    return std::make_unique<LoggedGroup>(inner_.split(color, key), log_);
  }
  std::shared_ptr<const void> pause_deadline() override { return inner_.pause_deadline(); }
  void check() override { inner_.check(); }
  void abort(std::string_view reason) noexcept override { inner_.abort(reason); }

 private:
  int world_rank(int rank) const override { return rank; }

  void enqueue(comm::Collective c, const engine::Stream& stream) override {
    using Op = comm::Collective::Op;
    const std::string& label = c.work.detail;
    log_.add({.text = std::string(c.work.name) + " " + label,
              .op = c.op,
              .num_ranks = size(),
              .in_nbytes = c.in.nbytes(),
              .out_nbytes = c.out.nbytes(),
              .group = this,
              .stream = stream.name()});
    switch (c.op) {
      case Op::kAllGather:
        return inner_.all_gather(c.in, c.out, stream, label);
      case Op::kReduceScatter:
        return inner_.reduce_scatter(c.in, c.out, c.accumulate, stream, label);
      case Op::kAllReduce:
        return inner_.all_reduce(c.in, c.out, c.accumulate, stream, label);
      case Op::kBroadcast:
        return inner_.broadcast(c.in, c.root, stream, label);
      case Op::kAllToAll:
        return inner_.all_to_all(c.in, c.out, stream, label);
    }
  }

  std::unique_ptr<comm::ProcessGroup> owned_;
  comm::ProcessGroup& inner_;
  CollectiveLog& log_;
};

}  // namespace tessera::testing
