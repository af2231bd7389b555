// Reads event files as their format says, bit by bit, and shares nothing with what writes them.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::testing {

struct EventRead {
  double wall_time = 0;
  std::int64_t step = 0;
  std::string version = {};
  bool starts_session = false;
  std::map<std::string, float> scalars = {};
};

/// CRC-32C by long division.
inline std::uint32_t slow_crc32c(std::string_view bytes) {
  std::uint32_t crc = ~std::uint32_t{0};
  for (const char c : bytes) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = crc / 2 ^ (crc % 2 == 1 ? 0x82f63b78u : 0);
  }
  return ~crc;
}

class EventReader {
 public:
  /// Throws std::runtime_error where a length or a checksum is wrong.
  static std::vector<EventRead> read(std::string_view file) {
    std::vector<EventRead> events;
    while (!file.empty()) {
      const std::string_view length = take(file, 8);
      check(length, take(file, 4));
      const std::string_view bytes = take(file, value<std::uint64_t>(length));
      check(bytes, take(file, 4));
      events.push_back(event(bytes));
    }
    return events;
  }

 private:
  template <class T>
  static T value(std::string_view bytes) {
    T value;
    std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }
  static std::string_view take(std::string_view& text, std::uint64_t count) {
    if (text.size() < count) throw std::runtime_error("cut short");
    const std::string_view part = text.substr(0, count);
    text.remove_prefix(count);
    return part;
  }
  static void check(std::string_view bytes, std::string_view stored) {
    const std::uint32_t crc = slow_crc32c(bytes);
    const std::uint32_t masked = (crc >> 15 | crc << 17) + 0xa282ead8u;
    if (masked != value<std::uint32_t>(stored)) throw std::runtime_error("wrong checksum");
  }
  static std::uint64_t varint(std::string_view& text) {
    std::uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<unsigned char>(take(text, 1)[0]);
      value |= std::uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return value;
    }
  }
  /// Calls use(field, integer, bytes) with each field of a message.
  template <class Use>
  static void fields(std::string_view message, Use use) {
    while (!message.empty()) {
      const std::uint64_t key = varint(message);
      std::uint64_t integer = 0;
      std::string_view bytes;
      switch (key % 8) {
        case 0:
          integer = varint(message);
          break;
        case 1:
          bytes = take(message, 8);
          break;
        case 2:
          bytes = take(message, varint(message));
          break;
        case 5:
          bytes = take(message, 4);
          break;
        default:
          throw std::runtime_error("unknown wire type");
      }
      use(key / 8, integer, bytes);
    }
  }
  static EventRead event(std::string_view bytes) {
    EventRead read;
    fields(bytes, [&](std::uint64_t field, std::uint64_t integer, std::string_view part) {
      if (field == 1) read.wall_time = value<double>(part);
      if (field == 2) read.step = static_cast<std::int64_t>(integer);
      if (field == 3) read.version = part;
      if (field == 5) summary(part, read);
      if (field == 7) read.starts_session = part == std::string_view("\x08\x01", 2);
    });
    return read;
  }
  static void summary(std::string_view bytes, EventRead& read) {
    fields(bytes, [&](std::uint64_t, std::uint64_t, std::string_view one) {
      std::string tag;
      fields(one, [&](std::uint64_t field, std::uint64_t, std::string_view part) {
        if (field == 1) tag = part;
        if (field == 2) read.scalars[tag] = value<float>(part);
      });
    });
  }
};

}  // namespace tessera::testing
