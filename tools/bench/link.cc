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

void LinkedGroup::enqueue(comm::Collective c, const engine::Stream& stream) {
  using Op = comm::Collective::Op;
  const auto size = static_cast<double>(inner_.size());
  const auto whole = static_cast<double>(std::max(c.in.nbytes(), c.out.nbytes()));
  const double sent = (c.op == Op::kAllReduce ? 2 : 1) * whole * (size - 1) / size;
  const std::string label = c.work.detail;
  stream.launch({.name = "link", .detail = label},
                [&link = link_, sent, is_edge = is_edge_(label)] { link.pass(sent, is_edge); });
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

}  // namespace tessera::tools
