// The all_gather that processes of a job are in, as process 0 hears it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/control/protocol.h"

namespace tessera::comm::control {

class Gathering {
 public:
  explicit Gathering(int num_processes) : texts_(static_cast<std::size_t>(num_processes)) {}

  /// Throws CommError unless it is that process's turn to say this.
  void add(int process, Gather gather);

  bool has_begun() const { return first_ >= 0; }
  bool has(int process) const { return texts_[static_cast<std::size_t>(process)].has_value(); }
  int first() const { return first_; }                 ///< who called it first
  const std::string& label() const { return label_; }  ///< that one's
  std::size_t nbytes() const { return nbytes_; }       ///< of all texts
  bool is_complete() const;
  /// The texts of all. What follows is another all_gather.
  Gathered take();

 private:
  std::uint64_t sequence_ = 0;
  int first_ = -1;
  std::string label_;
  std::size_t nbytes_ = 0;
  std::vector<std::optional<std::string>> texts_;
};

}  // namespace tessera::comm::control
