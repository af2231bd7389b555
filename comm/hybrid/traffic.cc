#include "comm/hybrid/traffic.h"

#include <algorithm>
#include <numeric>

namespace tessera::comm {

std::int64_t bytes_between_processes(const Collective& c, std::span<const int> num_ranks) {
  if (num_ranks.size() < 2) return 0;
  const auto processes = std::ssize(num_ranks), others = processes - 1;
  const std::int64_t ranks = std::reduce(num_ranks.begin(), num_ranks.end(), std::int64_t{0});
  const bool are_threads = ranks > processes;  // see comm/hybrid/chain.h
  const std::int64_t in = c.in.nbytes(), sums = c.in.numel() * std::int64_t{sizeof(float)};
  switch (c.op) {
    case Collective::Op::kAllGather:
      return others * ranks * in;
    case Collective::Op::kReduceScatter: {
      if (!are_threads) return others * in;
      const auto elsewhere = [&](int here) { return (ranks - here) * c.out.nbytes(); };
      const bool adds = c.accumulate == Accumulate::kYes;
      return others * sums + elsewhere(num_ranks.back()) +
             (adds ? elsewhere(num_ranks.front()) : 0);
    }
    case Collective::Op::kAllReduce:
      return others * (are_threads ? 2 * sums : in + c.out.nbytes());
    case Collective::Op::kBroadcast:
      return others * in;
    case Collective::Op::kAllToAll: {
      std::int64_t pairs = 0;  // of ranks in two processes
      for (const int here : num_ranks) pairs += here * (ranks - here);
      return pairs * (in / ranks);
    }
  }
  return 0;  // no other
}

}  // namespace tessera::comm
