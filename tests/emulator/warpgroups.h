// The products of warpgroups of one block, from issue to wait. Private to the emulated device.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/emulator/async_proxy.h"
#include "tests/emulator/wgmma.h"

namespace tessera::cuda_emulation {

/// What 32 lanes passed to a function, in order.
template <class T>
using Lanes = std::array<const T*, 32>;

/// All functions return what went wrong, or an empty text. `warp` is that of the block.
class Warpgroups {
 public:
  void start() {
    for (Warp& warp : warps_) warp = {};
    for (auto& issued : issued_) issued.clear();
  }
  std::string fence(unsigned warp, const Lanes<RegistersList>& named);
  std::string issue(unsigned warp, const AsyncProxy& proxy, const Lanes<WarpgroupProduct>& lanes);
  void commit(unsigned warp) { ++warps_[warp].num_committed; }
  std::string wait(unsigned warp, AsyncProxy& proxy, int num_pending,
                   const Lanes<RegistersList>& named);
  /// Once all threads have left.
  std::string finish() const;

 private:
  static constexpr int kLanes = 32;
  static constexpr int kRows = 16, kDepth = 16;

  // Registers that were named in a fence.
  struct Fenced {
    std::array<std::byte*, kLanes> data;
    std::size_t nbytes;
    std::vector<std::byte> values;  // as they were then, lane by lane
    bool operator==(const Fenced&) const = default;
  };
  // 16 bytes of an operand, as they were read.
  struct Chunk {
    std::uint32_t address;
    std::array<std::byte, 16> bytes;
  };
  struct UnderWay {
    int group;
    std::vector<Chunk> chunks;
    std::array<const std::uint32_t*, kLanes> a;  // null: in shared memory
    std::array<std::array<std::uint32_t, 4>, kLanes> a_values;
  };
  struct Accumulator {
    std::array<float*, kLanes> d;
    std::size_t num_d;
    std::vector<float> values;  // (kRows, 2 num_d)
    int group;                  // of the last product
    bool is_done = false;
  };
  struct Warp {
    std::vector<Fenced> fenced;
    std::vector<UnderWay> under_way;
    std::vector<Accumulator> accumulators;
    int num_committed = 0;
    std::size_t num_issued = 0;
  };
  // What all warps of a warpgroup have to issue.
  struct Issued {
    std::uint64_t descriptor_a, descriptor_b;
    int num_d;
    bool has_a, a_is_transposed, b_is_transposed, accumulate;
    bool operator==(const Issued&) const = default;
  };
  struct Operand;

  static std::string read(const AsyncProxy& proxy, const Operand& operand, UnderWay& product,
                          float* to);
  static std::string check(const Warp& warp, const void* lane0, std::size_t nbytes,
                           const char* what);
  static std::string deposit(Warp& warp, const Lanes<RegistersList>& named, const char* function);
  static void forget(Warp& warp, const std::byte* begin, std::size_t nbytes);

  Warp warps_[32];
  std::vector<Issued> issued_[8];  // by warpgroup
};

}  // namespace tessera::cuda_emulation
