#include "tools/probe/checksum.h"

#include <bit>
#include <cmath>
#include <limits>

namespace tessera::tools {
namespace {

// splitmix64 (Steele, Lea, Flood 2014) of index and bits, which no two elements share.
std::uint64_t mix(std::uint32_t bits, std::uint64_t index) {
  std::uint64_t z = (index << 32 | bits) + ((index >> 32) + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

double larger(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<double>::quiet_NaN();
  return a < b ? b : a;
}

}  // namespace

Checksum& Checksum::operator+=(const Checksum& other) {
  hash += other.hash;
  numel += other.numel;
  max_abs = larger(max_abs, other.max_abs);
  sum += other.sum;
  return *this;
}

Checksum checksum_of(std::span<const float> values, std::int64_t first) {
  Checksum c{.numel = std::ssize(values)};
  auto index = static_cast<std::uint64_t>(first);
  for (const float x : values) {
    c.hash += mix(std::bit_cast<std::uint32_t>(x), index++);
    c.max_abs = larger(c.max_abs, std::abs(double{x}));
    c.sum += double{x};
  }
  return c;
}

}  // namespace tessera::tools
