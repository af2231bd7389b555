// Compiled without ThreadSanitizer (see BUILD), as the rest of the scheduler.
#include "tests/emulator/warpgroups.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace tessera::cuda_emulation {
namespace {

constexpr std::uint32_t kPoison = 0xFFFFFFFF;  // a NaN

float widened(std::uint32_t bits) { return std::bit_cast<float>(bits << 16); }

bool contains(const std::byte* begin, std::size_t nbytes, const std::byte* other,
              std::size_t other_nbytes) {
  return other >= begin && other + other_nbytes <= begin + nbytes;
}

bool overlap(const std::byte* a, std::size_t a_nbytes, const std::byte* b, std::size_t b_nbytes) {
  return a < b + b_nbytes && b < a + a_nbytes;
}

template <class T>
const std::byte* bytes_of(const T* pointer) {
  return reinterpret_cast<const std::byte*>(pointer);
}

const std::byte* bytes_of(const Registers& registers) {
  return static_cast<const std::byte*>(registers.data);
}

}  // namespace

// A matrix of `rows` (M or N) by 16 (K) in shared memory: "Matrix Descriptor Format" and "Strides".
struct Warpgroups::Operand {
  std::uint64_t descriptor;
  bool is_transposed;  // MN-major
  unsigned first_row, rows;

  unsigned mode() const { return static_cast<unsigned>(descriptor >> 62); }
  unsigned base_offset() const { return static_cast<unsigned>(descriptor >> 49 & 7u); }
  std::uint32_t start() const { return field(0); }
  std::uint32_t lbo() const { return field(16); }
  std::uint32_t sbo() const { return field(32); }

  // 16-byte pieces of a row of the swizzle's atom.
  unsigned width() const {
    constexpr unsigned kWidths[] = {1, 8, 4, 2};
    return kWidths[mode()];
  }
  // Where the 8 elements are that begin at this row and k, one of them a multiple of 8. Offsets in
  // bytes are those of the canonical layouts, for elements of 2 bytes.
  std::uint32_t address(unsigned row, unsigned k) const {
    const unsigned w = width();
    std::uint32_t at = start();
    if (is_transposed && mode() == 0) {
      at += row / 8 * sbo() + k % 8 * 16 + k / 8 * lbo();
    } else if (is_transposed) {
      at += row / 8 % w * 16 + row / (8 * w) * lbo() + k % 8 * (16 * w) + k / 8 * sbo();
    } else if (mode() == 0) {
      at += row % 8 * 16 + row / 8 * sbo() + k / 8 * lbo();
    } else {
      at += row % 8 * (16 * w) + row / 8 * sbo() + k / 8 * 16;
    }
    return at ^ ((at >> 7 & (w - 1)) << 4);
  }

 private:
  std::uint32_t field(int bit) const {
    return static_cast<std::uint32_t>(descriptor >> bit & 0x3FFFu) << 4;
  }
};

// Takes the operand to `to` (rows, 16), and notes what was read.
std::string Warpgroups::read(const AsyncProxy& proxy, const Operand& operand, UnderWay& product,
                             float* to) {
  if (operand.base_offset() != 0) return "wgmma with a base offset, which is not emulated";
  const unsigned row_step = operand.is_transposed ? 8 : 1, k_step = operand.is_transposed ? 1 : 8;
  for (unsigned row = 0; row < operand.rows; row += row_step) {
    for (unsigned k = 0; k < kDepth; k += k_step) {
      Chunk chunk{operand.address(operand.first_row + row, k), {}};
      switch (proxy.sight(chunk.address, sizeof chunk.bytes)) {
        case AsyncProxy::Sight::kVisible:
          break;
        case AsyncProxy::Sight::kOutside:
          return fmt::format("wgmma reads shared memory at {}, outside the dynamic part",
                             chunk.address);
        case AsyncProxy::Sight::kUnknown:
          return fmt::format(
              "wgmma reads shared memory at {} that neither cp_async_16 nor store_operand wrote",
              chunk.address);
        case AsyncProxy::Sight::kUnfenced:
          return fmt::format(
              "wgmma reads shared memory at {} whose writer has not called fence_async_proxy since",
              chunk.address);
        case AsyncProxy::Sight::kUnordered:
          return fmt::format(
              "wgmma reads shared memory at {} with no barrier behind its writer's "
              "fence_async_proxy",
              chunk.address);
      }
      std::memcpy(chunk.bytes.data(), proxy.at(chunk.address), sizeof chunk.bytes);
      for (unsigned e = 0; e < 8; ++e) {
        std::uint16_t bits;
        std::memcpy(&bits, chunk.bytes.data() + 2 * e, sizeof bits);
        const unsigned at_row = row + (operand.is_transposed ? e : 0);
        to[at_row * kDepth + k + (operand.is_transposed ? 0 : e)] = widened(bits);
      }
      product.chunks.push_back(chunk);
    }
  }
  return "";
}

// Drops what is known of fences for registers of lane 0.
void Warpgroups::forget(Warp& warp, const std::byte* begin, std::size_t nbytes) {
  std::erase_if(warp.fenced, [&](const Fenced& fenced) {
    return overlap(fenced.data[0], fenced.nbytes, begin, nbytes);
  });
}

// Gives registers that are named the results of products that are done.
std::string Warpgroups::deposit(Warp& warp, const Lanes<RegistersList>& named,
                                const char* function) {
  for (std::size_t i = 0; i < named[0]->size(); ++i) {
    const Registers& first = named[0]->begin()[i];
    for (Accumulator& acc : warp.accumulators) {
      if (!overlap(bytes_of(first), first.nbytes, bytes_of(acc.d[0]), acc.num_d * sizeof(float)))
        continue;
      if (!acc.is_done)
        return fmt::format("{} names an accumulator of a product under way", function);
      for (unsigned lane = 0; lane < kLanes; ++lane) {
        const unsigned g = lane / 4, t = lane % 4;
        for (unsigned j = 0; j < acc.num_d; ++j) {
          if (std::bit_cast<std::uint32_t>(acc.d[lane][j]) != kPoison)
            return "an accumulator was written before a wgmma_wait named it";
          const unsigned row = g + 8 * (j / 2 % 2), column = 8 * (j / 4) + 2 * t + j % 2;
          acc.d[lane][j] = acc.values[row * 2 * acc.num_d + column];
        }
      }
      acc.num_d = 0;  // has gone
    }
    std::erase_if(warp.accumulators, [](const Accumulator& acc) { return acc.num_d == 0; });
  }
  return "";
}

std::string Warpgroups::fence(unsigned index, const Lanes<RegistersList>& named) {
  Warp& warp = warps_[index];
  if (std::string text = deposit(warp, named, "wgmma_fence"); !text.empty()) return text;
  for (std::size_t i = 0; i < named[0]->size(); ++i) {
    Fenced fenced{{}, named[0]->begin()[i].nbytes, {}};
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      fenced.data[lane] = static_cast<std::byte*>(named[lane]->begin()[i].data);
      fenced.values.insert(fenced.values.end(), fenced.data[lane],
                           fenced.data[lane] + fenced.nbytes);
    }
    for (const UnderWay& product : warp.under_way) {
      if (product.a[0] != nullptr &&
          overlap(bytes_of(product.a[0]), 16, fenced.data[0], fenced.nbytes))
        return "wgmma_fence names a left operand of a product under way";
    }
    forget(warp, fenced.data[0], fenced.nbytes);
    warp.fenced.push_back(std::move(fenced));
  }
  return "";
}

// Are these registers as a fence has seen them?
std::string Warpgroups::check(const Warp& warp, const void* lane0, std::size_t nbytes,
                              const char* what) {
  const auto* begin = static_cast<const std::byte*>(lane0);
  const auto found = std::ranges::find_if(warp.fenced, [&](const Fenced& fenced) {
    return contains(fenced.data[0], fenced.nbytes, begin, nbytes);
  });
  if (found == warp.fenced.end())
    return fmt::format("wgmma with {} that no wgmma_fence has named since its last use", what);
  const std::ptrdiff_t offset = begin - found->data[0];
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    const std::byte* then = found->values.data() + lane * found->nbytes + offset;
    if (std::memcmp(found->data[lane] + offset, then, nbytes) != 0)
      return fmt::format("wgmma with {} that was written since wgmma_fence named it", what);
  }
  return "";
}

std::string Warpgroups::issue(unsigned index, const AsyncProxy& proxy,
                              const Lanes<WarpgroupProduct>& lanes) {
  Warp& warp = warps_[index];
  const WarpgroupProduct& first = *lanes[0];
  const auto issued_of = [](const WarpgroupProduct& p) {
    return Issued{p.descriptor_a,    p.descriptor_b,    p.num_d,     p.a != nullptr,
                  p.a_is_transposed, p.b_is_transposed, p.accumulate};
  };
  for (const WarpgroupProduct* lane : lanes) {
    if (issued_of(*lane) != issued_of(first)) return "wgmma with operands that differ by lane";
  }
  std::vector<Issued>& issued = issued_[index / 4];
  if (warp.num_issued == issued.size()) {
    issued.push_back(issued_of(first));
  } else if (issued[warp.num_issued] != issued_of(first)) {
    return "wgmma with operands that differ by warp of the warpgroup";
  }
  ++warp.num_issued;

  const auto num_d = static_cast<std::size_t>(first.num_d);
  const std::size_t columns = 2 * num_d, d_nbytes = num_d * sizeof(float);
  UnderWay product{.group = warp.num_committed, .chunks = {}, .a = {}, .a_values = {}};
  float a[kRows * kDepth];
  std::vector<float> b(columns * kDepth);
  if (first.a == nullptr) {
    const Operand operand{first.descriptor_a, first.a_is_transposed, index % 4 * kRows, kRows};
    if (std::string text = read(proxy, operand, product, a); !text.empty()) return text;
  } else {
    if (std::string text = check(warp, first.a, 16, "a left operand"); !text.empty()) return text;
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      product.a[lane] = lanes[lane]->a;
      std::memcpy(product.a_values[lane].data(), lanes[lane]->a, 16);
      const unsigned g = lane / 4, t = lane % 4;
      for (unsigned r = 0; r < 4; ++r) {
        float* pair = &a[(g + 8 * (r % 2)) * kDepth + 2 * t + 8 * (r / 2)];
        const std::uint32_t word = product.a_values[lane][r];
        pair[0] = widened(word & 0xFFFFu);
        pair[1] = widened(word >> 16);
      }
    }
  }
  const Operand right{first.descriptor_b, first.b_is_transposed, 0, static_cast<unsigned>(columns)};
  if (std::string text = read(proxy, right, product, b.data()); !text.empty()) return text;

  auto acc = std::ranges::find_if(warp.accumulators, [&](const Accumulator& other) {
    return overlap(bytes_of(other.d[0]), other.num_d * sizeof(float), bytes_of(first.d), d_nbytes);
  });
  if (acc != warp.accumulators.end() && (acc->d[0] != first.d || acc->num_d != num_d))
    return "wgmma with part of another accumulator that is under way";
  if (acc != warp.accumulators.end() && acc->is_done)
    return "wgmma with an accumulator that no wgmma_fence has named since its last use";
  if (acc == warp.accumulators.end()) {
    if (std::string text = check(warp, first.d, d_nbytes, "an accumulator"); !text.empty())
      return text;
    acc = warp.accumulators.insert(acc,
                                   Accumulator{{}, num_d, std::vector<float>(kRows * columns), 0});
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      acc->d[lane] = lanes[lane]->d;
      const unsigned g = lane / 4, t = lane % 4;
      for (unsigned j = 0; j < num_d; ++j) {
        const unsigned row = g + 8 * (j / 2 % 2), column = 8 * (j / 4) + 2 * t + j % 2;
        acc->values[row * columns + column] = acc->d[lane][j];
      }
      std::memset(acc->d[lane], 0xFF, d_nbytes);
    }
  }
  acc->group = warp.num_committed;
  float* d = acc->values.data();
  if (!first.accumulate) std::fill(d, d + kRows * columns, 0.0f);
  // (16, columns): neighbours in the innermost loop are neighbours in memory.
  std::vector<float> b_by_k(columns * kDepth);
  for (std::size_t n = 0; n < columns; ++n)
    for (unsigned k = 0; k < kDepth; ++k) b_by_k[k * columns + n] = b[n * kDepth + k];
  for (unsigned row = 0; row < kRows; ++row) {
    for (unsigned k = 0; k < kDepth; ++k) {
      const float factor = a[row * kDepth + k];
      const float* b_row = &b_by_k[k * columns];
      for (std::size_t n = 0; n < columns; ++n) d[row * columns + n] += factor * b_row[n];
    }
  }
  warp.under_way.push_back(std::move(product));
  return "";
}

std::string Warpgroups::wait(unsigned index, AsyncProxy& proxy, int num_pending,
                             const Lanes<RegistersList>& named) {
  Warp& warp = warps_[index];
  const auto is_over = [&](int group) { return group + num_pending < warp.num_committed; };
  for (const UnderWay& product : warp.under_way) {
    if (!is_over(product.group)) continue;
    for (const Chunk& chunk : product.chunks) {
      if (std::memcmp(proxy.at(chunk.address), chunk.bytes.data(), sizeof chunk.bytes) != 0)
        return fmt::format(
            "shared memory at {} was written while a wgmma that reads it was under way",
            chunk.address);
      proxy.note_read(chunk.address, sizeof chunk.bytes);
    }
    if (product.a[0] == nullptr) continue;
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      if (std::memcmp(product.a[lane], product.a_values[lane].data(), 16) != 0)
        return "a left operand was written while its wgmma was under way";
    }
    forget(warp, bytes_of(product.a[0]), 16);
  }
  std::erase_if(warp.under_way, [&](const UnderWay& product) { return is_over(product.group); });
  for (Accumulator& acc : warp.accumulators) {
    if (acc.is_done || !is_over(acc.group)) continue;
    acc.is_done = true;
    forget(warp, bytes_of(acc.d[0]), acc.num_d * sizeof(float));
  }
  return deposit(warp, named, "wgmma_wait");
}

std::string Warpgroups::finish() const {
  for (const Warp& warp : warps_) {
    const auto index = static_cast<std::size_t>(&warp - warps_);
    if (!warp.under_way.empty())
      return fmt::format("warp {} has left the kernel with wgmma under way", index);
    if (warp.num_issued != issued_[index / 4].size())
      return fmt::format("warp {} has left out wgmma that others of its warpgroup issued", index);
  }
  return "";
}

}  // namespace tessera::cuda_emulation
