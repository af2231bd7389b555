#include "engine/gemm/split.h"

#include <algorithm>
#include <array>

#include "engine/gemm/amx_tiles.h"
#include "engine/gemm/parts.h"
#include "engine/gemm/portable_tiles.h"

namespace tessera::engine {
namespace {

constexpr std::int64_t kSide = kPackSide, kLanes = 16;
// Columns of A that are packed at a time: with more C is read and written less often. What is
// packed fits a second-level cache of 2 MiB beside as much of C.
constexpr std::int64_t kMaxDepth = 512, kMaxScratch = 1 << 20;
// Sides from which on tiles gain: for few tiles packing takes longer than they save. Attention's
// tiles have fewer rows, and ask for no scratch.
constexpr std::int64_t kMinSplitSide = 64;

constexpr std::int64_t ceil_div(std::int64_t x, std::int64_t y) { return (x + y - 1) / y; }

// What is packed at a time: strips of 32 rows of A and 32 columns of B. Those of one operand are
// kept while those of the other pass, one at a time, for each group of the kept ones again.
struct Blocking {
  std::int64_t depth, strip_nbytes, num_kept;
  bool keeps_a;

  explicit Blocking(const SplitProduct& p)
      : depth(ceil_div(ceil_div(p.k, ceil_div(p.k, kMaxDepth)), kSide) * kSide),
        strip_nbytes(depth / kSide * kPackNbytes) {
    const std::int64_t room = kMaxScratch / strip_nbytes - 1;
    const std::int64_t of_a = ceil_div(p.m, kSide), of_b = ceil_div(p.n, kSide);
    const std::int64_t groups_of_a = ceil_div(of_a, room), groups_of_b = ceil_div(of_b, room);
    // To transpose takes as long as to pack.
    const std::int64_t cost_of_a = of_a * (p.a_transposed ? 2 : 1),
                       cost_of_b = of_b * (p.b_transposed ? 2 : 1);
    keeps_a = cost_of_a + groups_of_a * cost_of_b < groups_of_b * cost_of_a + cost_of_b;
    num_kept = keeps_a ? ceil_div(of_a, groups_of_a) : ceil_div(of_b, groups_of_b);
  }
};

// C (32, 32) = or += the product of packed strips. Tiles 0 to 3 are C, 4 and 5 of A, 6 and 7 of B.
template <class Tiles>
void multiply(Tiles& tiles, const std::byte* a, const std::byte* b, std::int64_t num_packs,
              float* c, std::int64_t ldc, bool accumulate) {
  const std::int64_t stride = ldc * 4;
  float* const lower = c + kLanes * ldc;
  if (accumulate) {
    tiles.template load<0>(c, stride);
    tiles.template load<1>(c + kLanes, stride);
    tiles.template load<2>(lower, stride);
    tiles.template load<3>(lower + kLanes, stride);
  } else {
    tiles.template zero<0>();
    tiles.template zero<1>();
    tiles.template zero<2>();
    tiles.template zero<3>();
  }
  for (std::int64_t i = 0; i < num_packs; ++i, a += kPackNbytes, b += kPackNbytes) {
    const auto load_a = [&](int part) {
      tiles.template load<4>(a + part * kPartNbytes, 64);
      tiles.template load<5>(a + part * kPartNbytes + kTileNbytes, 64);
    };
    const auto load_b = [&](int part) {
      tiles.template load<6>(b + part * kPartNbytes, 64);
      tiles.template load<7>(b + part * kPartNbytes + kTileNbytes, 64);
    };
    const auto add = [&] {
      tiles.template add_product<0, 4, 6>();
      tiles.template add_product<1, 4, 7>();
      tiles.template add_product<2, 5, 6>();
      tiles.template add_product<3, 5, 7>();
    };
    // In an order in which each loads one operand alone.
    load_a(2), load_b(0), add();
    load_a(1), add();
    load_b(1), add();
    load_a(0), add();
    load_b(2), add();
    load_b(0), add();
  }
  tiles.template store<0>(c, stride);
  tiles.template store<1>(c + kLanes, stride);
  tiles.template store<2>(lower, stride);
  tiles.template store<3>(lower + kLanes, stride);
}

// Multiplies a tile of which `rows` x `cols` of C are there.
template <class Tiles>
void multiply_part(Tiles& tiles, const std::byte* a, const std::byte* b, std::int64_t num_packs,
                   float* c, std::int64_t ldc, bool accumulate, std::int64_t rows,
                   std::int64_t cols) {
  if (rows == kSide && cols == kSide) return multiply(tiles, a, b, num_packs, c, ldc, accumulate);
  alignas(64) std::array<float, kSide * kSide> part{};
  if (accumulate) {
    for (std::int64_t i = 0; i < rows; ++i) std::copy_n(c + i * ldc, cols, &part[i * kSide]);
  }
  multiply(tiles, a, b, num_packs, part.data(), kSide, accumulate);
  for (std::int64_t i = 0; i < rows; ++i) std::copy_n(&part[i * kSide], cols, c + i * ldc);
}

template <class Tiles>
void run_on(const SplitProduct& p, std::byte* scratch) {
  const Blocking blocking(p);
  const StoredMatrix a{p.a, p.lda, p.a_transposed}, b{p.b, p.ldb, p.b_transposed};
  const std::int64_t strip = blocking.strip_nbytes, group = blocking.num_kept * kSide;
  std::byte *const kept = scratch, *const passing = scratch + blocking.num_kept * strip;
  const std::int64_t kept_end = blocking.keeps_a ? p.m : p.n,
                     passing_end = blocking.keeps_a ? p.n : p.m;
  Tiles tiles;
  const auto pack = [&](bool is_a, std::int64_t at, std::int64_t k, std::int64_t depth,
                        std::byte* dst) {
    is_a ? pack_rows(a.from(at, k), std::min(kSide, p.m - at), depth, dst)
         : pack_cols(b.from(k, at), depth, std::min(kSide, p.n - at), dst);
  };
  for (std::int64_t begin = 0; begin < kept_end; begin += group) {
    const std::int64_t end = std::min(begin + group, kept_end);
    for (std::int64_t k = 0; k < p.k; k += blocking.depth) {
      const std::int64_t depth = std::min(blocking.depth, p.k - k);
      const auto kept_strip = [&](std::int64_t at) { return kept + (at - begin) / kSide * strip; };
      for (std::int64_t at = begin; at < end; at += kSide)
        pack(blocking.keeps_a, at, k, depth, kept_strip(at));
      for (std::int64_t other = 0; other < passing_end; other += kSide) {
        pack(!blocking.keeps_a, other, k, depth, passing);
        for (std::int64_t at = begin; at < end; at += kSide) {
          const std::int64_t row = blocking.keeps_a ? at : other,
                             col = blocking.keeps_a ? other : at;
          multiply_part(tiles, blocking.keeps_a ? kept_strip(at) : passing,
                        blocking.keeps_a ? passing : kept_strip(at), ceil_div(depth, kSide),
                        p.c + row * p.ldc + col, p.ldc, p.accumulate || k > 0,
                        std::min(kSide, p.m - row), std::min(kSide, p.n - col));
        }
      }
    }
  }
}

}  // namespace

bool SplitProduct::suits() const { return std::min({m, n, k}) >= kMinSplitSide; }

std::int64_t SplitProduct::scratch_nbytes() const {
  const Blocking blocking(*this);
  return (blocking.num_kept + 1) * blocking.strip_nbytes;
}

void SplitProduct::run(std::byte* scratch) const { run_on<AmxTiles>(*this, scratch); }

void SplitProduct::run_portably(std::byte* scratch) const { run_on<PortableTiles>(*this, scratch); }

}  // namespace tessera::engine
