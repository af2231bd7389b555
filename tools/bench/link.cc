#include "tools/bench/link.h"

#include <algorithm>
#include <thread>

namespace tessera::tools {

void Link::pass(double nbytes, bool is_edge) {
  std::chrono::steady_clock::time_point end;
  {
    const std::lock_guard lock(mutex_);
    nbytes_ += nbytes;
    if (is_edge) edge_nbytes_ += nbytes;
    if (nbytes_per_s_ == 0) return;
    const std::chrono::duration<double> duration(nbytes / nbytes_per_s_);
    free_ = std::max(free_, std::chrono::steady_clock::now()) +
            std::chrono::duration_cast<std::chrono::steady_clock::duration>(duration);
    end = free_ + latency_;
  }
  std::this_thread::sleep_until(end);
}

double Link::nbytes() const {
  const std::lock_guard lock(mutex_);
  return nbytes_;
}

double Link::edge_nbytes() const {
  const std::lock_guard lock(mutex_);
  return edge_nbytes_;
}

void LinkedGroup::before(const comm::Collective& c, const engine::Stream& stream) {
  const auto sent = static_cast<double>(c.work.bytes_sent);
  const bool is_edge = is_edge_(c.work.detail);
  stream.launch({.name = "link", .detail = c.work.detail},
                [&link = link_, sent, is_edge] { link.pass(sent, is_edge); });
}

}  // namespace tessera::tools
