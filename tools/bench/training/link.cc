#include "tools/bench/training/link.h"

#include <algorithm>
#include <thread>

namespace tessera::tools {

void Link::pass(double nbytes) {
  if (nbytes_per_s_ == 0) return;
  std::chrono::steady_clock::time_point end;
  {
    const std::lock_guard lock(mutex_);
    const std::chrono::duration<double> duration(nbytes / nbytes_per_s_);
    free_ = std::max(free_, std::chrono::steady_clock::now()) +
            std::chrono::duration_cast<std::chrono::steady_clock::duration>(duration);
    end = free_ + latency_;
  }
  std::this_thread::sleep_until(end);
}

void Link::count(double nbytes, bool is_edge) {
  const std::lock_guard lock(mutex_);
  nbytes_ += nbytes;
  if (is_edge) edge_nbytes_ += nbytes;
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
  link_.count(sent, is_edge_(c.work.detail));
  stream.launch({.name = "link", .detail = c.work.detail},
                [&link = link_, sent] { link.pass(sent); });
}

}  // namespace tessera::tools
