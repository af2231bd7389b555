// The collectives that a rank calls, in the order in which it calls them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/forwarding_group.h"
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
  /// records() as text.
  std::vector<std::string> take() {
    std::vector<std::string> lines;
    for (const Record& record : records()) lines.push_back(record.text);
    return lines;
  }

 private:
  std::vector<Record> records_;
};

/// Passes on what is called on it, and on what is split from it, and logs it.
class LoggedGroup : public comm::ForwardingGroup {
 public:
  LoggedGroup(comm::ProcessGroup& inner, CollectiveLog& log) : ForwardingGroup(inner), log_(log) {}
  LoggedGroup(std::unique_ptr<comm::ProcessGroup> inner, CollectiveLog& log)
      : ForwardingGroup(std::move(inner)), log_(log) {}

  std::unique_ptr<comm::ProcessGroup> make_part(int color, int key) override {
    return std::make_unique<LoggedGroup>(inner().split(color, key), log_);
  }

 private:
  void before(const comm::Collective& c, const engine::Stream& stream) override {
    log_.add({.text = std::string(c.work.name) + " " + c.work.detail,
              .op = c.op,
              .num_ranks = size(),
              .in_nbytes = c.in.nbytes(),
              .out_nbytes = c.out.nbytes(),
              .group = this,
              .stream = stream.name()});
  }

  CollectiveLog& log_;
};

}  // namespace tessera::testing
