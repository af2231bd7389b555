// Memory between what ranks send each other and its sum.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/process_group.h"
#include "engine/memory.h"

namespace tessera::comm {

/// Elements or bytes: parts begin where wide accesses may.
constexpr std::int64_t round_up_part(std::int64_t n) {
  constexpr std::int64_t kAlignment = 64;
  return (n + kAlignment - 1) / kAlignment * kAlignment;
}

/// Of an all-reduce in the order of ranks: elements that one of `size` ranks sums.
inline std::int64_t all_reduce_part(std::int64_t numel, int size) {
  return round_up_part((numel + size - 1) / size);
}

/// Bytes that come from other ranks, or from NCCL, before they are summed; 0: none. `canonical`:
/// the sums are in the order of ranks.
inline std::int64_t staging_nbytes(const Collective& c, int size, bool canonical) {
  const bool scatters = c.op == Collective::Op::kReduceScatter;
  if (!scatters && c.op != Collective::Op::kAllReduce) return 0;
  const std::int64_t in_size = size_of(c.in.dtype());
  if (!canonical) {
    const bool is_direct = c.in.dtype() == engine::DType::kF32 && c.accumulate == Accumulate::kNo;
    return is_direct ? 0 : c.out.numel() * in_size;
  }
  return size * (scatters ? round_up_part(c.in.nbytes() / size)
                          : all_reduce_part(c.out.numel(), size) * in_size);
}

/// Elements of a sum that go through the processes of a hybrid group at once: few enough for one
/// process to add to one piece while the next one adds to the last.
constexpr std::int64_t kChainNumel = 64 << 10;

/// Bytes that each rank of such a group has for sums on their way; 0: none.
inline std::int64_t chain_nbytes(const Collective& c) {
  if (c.op != Collective::Op::kReduceScatter && c.op != Collective::Op::kAllReduce) return 0;
  return std::min(2 * kChainNumel, c.in.numel()) * std::int64_t{sizeof(float)};
}

/// Bytes that rank `rank` sends in an all-reduce with such memory; none for other collectives,
/// which send what Traffic says. NCCL's own all-reduce sends the dtype of its input in both halves;
/// in the order of ranks the parts of ranks may differ in size.
inline std::optional<std::int64_t> staged_bytes_sent(const Collective& c, int rank, int size,
                                                     bool canonical) {
  if (c.op != Collective::Op::kAllReduce) return std::nullopt;
  if (!canonical) return 2 * (c.in.nbytes() - c.in.nbytes() / size);
  const std::int64_t all = c.out.numel(), part = all_reduce_part(all, size);
  const std::int64_t mine =
      std::min(all, (rank + 1) * part) - std::min(all, std::int64_t{rank} * part);
  return (all - mine) * size_of(c.in.dtype()) + (size - 1) * mine * size_of(c.out.dtype());
}

/// One block a stream, which grows to the largest need, as work of its stream follows that of the
/// memory's home.
class Staging {
 public:
  /// Of what memory reports call it.
  explicit Staging(std::string name) : name_(std::move(name)) {}
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  /// At least `nbytes` for work that `stream` is told next, of the memory that an op's `out` has.
  /// Throws DeviceError.
  Tensor get(std::int64_t nbytes, const engine::Memory& memory, const Stream& stream);

 private:
  struct Block {
    Stream stream;
    Tensor bytes;
  };
  static void let_go(const Block& block);

  const std::string name_;
  std::vector<Block> blocks_;
};

}  // namespace tessera::comm
