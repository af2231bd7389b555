// What a communication hook sends and remembers, for the log.
#pragma once

#include <string>
#include <vector>

#include "shard/fsdp.h"
#include "shard/hooks/hooks.h"
#include "tools/io/jsonl.h"

namespace tessera::tools {

/// Of one rank; parameters in the order of units.
class HookReport {
 public:
  HookReport(const shard::Fsdp& fsdp, const shard::HookOptions& options);

  /// For the terminal: what it is, the bytes of one reduction before and after, and what is
  /// remembered. Empty for no hook.
  std::vector<std::string> lines() const;
  /// One line a parameter: shape, rank, bytes before and after, and how many times smaller.
  std::string table() const;
  /// For the last record of the log.
  JsonRecord record() const;

 private:
  struct Row {
    std::string name, shape;
    std::int64_t rank;
    double before, after;
  };
  bool is_given_, is_noop_, compresses_;
  std::string text_;
  std::vector<Row> rows_;
  double before_ = 0, after_ = 0;
  std::int64_t on_device_ = 0, on_host_ = 0;
};

}  // namespace tessera::tools
