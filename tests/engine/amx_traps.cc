#include "tests/engine/amx_traps.h"

#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "engine/isa.h"

namespace tessera::engine {

#if defined(__x86_64__)

namespace {

constexpr std::size_t kNumTiles = 8, kMaxRows = 16, kMaxRowNbytes = 64,
                      kMaxColumns = kMaxRowNbytes / 2;  // of bf16

[[noreturn]] void give_up(std::string_view why) {
  constexpr std::string_view kBegin = "[amx_traps] ";
  (void)!write(STDERR_FILENO, kBegin.data(), kBegin.size());
  (void)!write(STDERR_FILENO, why.data(), why.size());
  (void)!write(STDERR_FILENO, "\n", 1);
  std::abort();
}

void expect(bool holds, std::string_view otherwise) {
  if (!holds) give_up(otherwise);
}

// Operands and results below the least normal number are 0.
float flushed(float v) { return std::abs(v) < 0x1p-126f ? std::copysign(0.0f, v) : v; }

float widened(std::uint16_t bf16) {
  const std::uint32_t bits = std::uint32_t{bf16} << 16;
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return flushed(v);
}

// "TILE CONFIGURATION": 64 bytes of memory.
struct Config {
  std::uint8_t palette, start_row, reserved[14];
  std::uint16_t row_nbytes[16];
  std::uint8_t num_rows[16];
};
static_assert(sizeof(Config) == 64);

struct Tile {
  std::byte bytes[kMaxRows][kMaxRowNbytes];

  template <class T>
  T get(std::size_t row, std::size_t index) const {
    T value;
    std::memcpy(&value, bytes[row] + index * sizeof(T), sizeof(T));
    return value;
  }
};

struct Tiles {
  Config config;
  std::array<Tile, kNumTiles> tiles;

  void configure(const void* from) {
    std::memcpy(&config, from, sizeof config);
    tiles = {};
    if (config.palette == 0) return void(config = {});
    expect(config.palette == 1, "ldtilecfg with a palette other than 0 and 1");
    expect(config.start_row == 0, "ldtilecfg in the middle of a load");
    for (const std::uint8_t byte : config.reserved)
      expect(byte == 0, "ldtilecfg with reserved bytes");
    for (std::size_t i = 0; i < 16; ++i) {
      const bool is_there = config.num_rows[i] != 0;
      expect(is_there == (config.row_nbytes[i] != 0), "ldtilecfg of a tile with one side alone");
      expect(!is_there || i < kNumTiles, "ldtilecfg of more than 8 tiles");
      expect(config.num_rows[i] <= kMaxRows && config.row_nbytes[i] <= kMaxRowNbytes,
             "ldtilecfg of a tile above 16 x 64 bytes");
    }
  }
  std::size_t rows(std::size_t tile) const { return config.num_rows[tile]; }
  std::size_t row_nbytes(std::size_t tile) const { return config.row_nbytes[tile]; }
  void expect_shape(std::size_t tile) const {
    expect(config.palette == 1, "a tile instruction with no tiles configured");
    expect(tile < kNumTiles && rows(tile) > 0, "a tile that is not configured");
  }

  void zero(std::size_t tile) {
    expect_shape(tile);
    tiles[tile] = {};
  }
  void load(std::size_t tile, const std::byte* from, std::int64_t stride) {
    zero(tile);
    for (std::size_t i = 0; i < rows(tile); ++i)
      std::memcpy(tiles[tile].bytes[i], from + static_cast<std::int64_t>(i) * stride,
                  row_nbytes(tile));
  }
  void store(std::size_t tile, std::byte* to, std::int64_t stride) const {
    expect_shape(tile);
    for (std::size_t i = 0; i < rows(tile); ++i)
      std::memcpy(to + static_cast<std::int64_t>(i) * stride, tiles[tile].bytes[i],
                  row_nbytes(tile));
  }
  // TDPBF16PS: two sums for each result, of even and of odd columns.
  void add_product(std::size_t c, std::size_t a, std::size_t b) {
    for (const std::size_t tile : {c, a, b}) expect_shape(tile);
    expect(c != a && c != b && a != b, "tdpbf16ps with a tile named twice");
    expect(rows(c) == rows(a) && row_nbytes(a) == 4 * rows(b) && row_nbytes(c) == row_nbytes(b),
           "tdpbf16ps of tiles that do not fit");
    const std::size_t depth = rows(b), columns = row_nbytes(c) / 4;
    with_isa([&] {
      float factors[kMaxRows][kMaxColumns];  // of b
      for (std::size_t k = 0; k < depth; ++k)
        for (std::size_t n = 0; n < 2 * columns; ++n)
          factors[k][n] = widened(tiles[b].get<std::uint16_t>(k, n));
      for (std::size_t m = 0; m < rows(c); ++m) {
        float sums[kMaxColumns] = {};  // even, odd, even, odd
        for (std::size_t k = 0; k < depth; ++k) {
          const float pair[] = {widened(tiles[a].get<std::uint16_t>(m, 2 * k)),
                                widened(tiles[a].get<std::uint16_t>(m, 2 * k + 1))};
          for (std::size_t n = 0; n < 2 * columns; ++n)
            sums[n] = flushed(std::fma(pair[n % 2], factors[k][n], sums[n]));
        }
        for (std::size_t n = 0; n < columns; ++n) {
          const float sum =
              flushed(flushed(tiles[c].get<float>(m, n)) + flushed(sums[2 * n] + sums[2 * n + 1]));
          std::memcpy(tiles[c].bytes[m] + 4 * n, &sum, sizeof sum);
        }
      }
    });
  }
};

thread_local Tiles tiles_of_thread;

// One instruction with a VEX prefix of three bytes, and the registers before it.
class Instruction {
 public:
  Instruction(const std::uint8_t* code, const greg_t* registers)
      : at_(code), registers_(registers) {
    expect(code[0] == 0xC4, "an illegal instruction without a VEX prefix of three bytes");
    expect((code[1] & 0x1F) == 2, "an illegal instruction outside the map 0F38");
    expect((code[2] & 0x84) == 0, "an illegal instruction with W or L");
    r_ = code[1] & 0x80 ? 0 : 8;
    x_ = code[1] & 0x40 ? 0 : 8;
    b_ = code[1] & 0x20 ? 0 : 8;
    v_ = ~code[2] >> 3 & 15;
    prefix_ = code[2] & 3;
    opcode_ = code[3];
    modrm_ = code[4];
    at_ += 5;
    if (!is_register() && rm() % 8 == 4) sib_ = *at_++;
    if (!is_register()) read_displacement();
  }
  // The operation and its prefix: 1 is 66, 2 is F3, 3 is F2.
  unsigned operation() const { return unsigned{opcode_} << 8 | prefix_; }
  bool is_register() const { return modrm_ >> 6 == 3; }
  bool has_sib() const { return !is_register() && rm() % 8 == 4; }
  unsigned reg() const { return (modrm_ >> 3 & 7u) + r_; }
  unsigned rm() const { return (modrm_ & 7u) + b_; }
  unsigned v() const { return v_; }
  const std::uint8_t* end() const { return at_; }

  // Of memory, without the index that is a stride to instructions on tiles.
  std::byte* base() const {
    std::int64_t address = displacement_;
    if (has_sib()) {
      if (!has_no_base()) address += value((sib_ & 7u) + b_);
    } else if (has_no_base()) {
      address += reinterpret_cast<std::int64_t>(at_);  // after the instruction
    } else {
      address += value(rm());
    }
    return reinterpret_cast<std::byte*>(address);
  }
  std::int64_t index() const {
    const unsigned index = (sib_ >> 3 & 7u) + x_;
    return has_sib() && index != 4 ? value(index) << (sib_ >> 6) : 0;
  }

 private:
  bool has_no_base() const { return modrm_ >> 6 == 0 && ((has_sib() ? sib_ : modrm_) & 7) == 5; }
  void read_displacement() {
    if (modrm_ >> 6 == 1) {
      std::int8_t displacement;
      std::memcpy(&displacement, at_++, sizeof displacement);
      displacement_ = std::int64_t{displacement};
    } else if (modrm_ >> 6 == 2 || has_no_base()) {
      std::int32_t displacement;
      std::memcpy(&displacement, at_, sizeof displacement);
      displacement_ = displacement;
      at_ += sizeof displacement;
    }
  }
  std::int64_t value(unsigned number) const {
    constexpr int kOrder[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                              REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                              REG_R12, REG_R13, REG_R14, REG_R15};
    return registers_[kOrder[number]];
  }

  const std::uint8_t* at_;
  const greg_t* registers_;
  std::uint8_t opcode_, modrm_, sib_ = 0, prefix_;
  unsigned r_, x_, b_, v_;
  std::int64_t displacement_ = 0;
};

void execute(const Instruction& code, Tiles& tiles) {
  constexpr unsigned kConfigure = 0x4900, kStoreConfig = 0x4901, kZero = 0x4903, kLoad = 0x4B03,
                     kStore = 0x4B02, kProduct = 0x5C02;
  expect(code.operation() == kProduct || code.v() == 0,
         "a tile instruction with one operand too many");
  switch (code.operation()) {
    case kConfigure:
      if (code.is_register()) return void(tiles = {});  // tilerelease
      return tiles.configure(code.base() + code.index());
    case kStoreConfig:
      return void(std::memcpy(code.base() + code.index(), &tiles.config, sizeof tiles.config));
    case kZero:
      return tiles.zero(code.reg());
    case kLoad:
    case kStore:
      expect(code.has_sib(), "a load or store of a tile without SIB");
      if (code.operation() == kLoad) return tiles.load(code.reg(), code.base(), code.index());
      return tiles.store(code.reg(), code.base(), code.index());
    case kProduct:
      expect(code.is_register(), "tdpbf16ps with memory");
      return tiles.add_product(code.reg(), code.rm(), code.v());
    default:
      give_up("an illegal instruction that is none of those on tiles known here");
  }
}

void handle(int, siginfo_t*, void* context) {
  greg_t* const registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const Instruction code(reinterpret_cast<const std::uint8_t*>(registers[REG_RIP]), registers);
  execute(code, tiles_of_thread);
  registers[REG_RIP] = reinterpret_cast<greg_t>(code.end());
}

}  // namespace

void trap_tile_instructions() {
  struct sigaction action = {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO;
  if (sigaction(SIGILL, &action, nullptr) != 0) give_up("sigaction failed");
}

#else

void trap_tile_instructions() {}  // AmxTiles are portable tiles there

#endif

}  // namespace tessera::engine
