#include "tools/io/event_file.h"

#include <array>
#include <bit>

namespace tessera::tools {
namespace {

constexpr std::array<std::uint32_t, 256> crc_table() {
  constexpr std::uint32_t kPolynomial = 0x82f63b78;  // Castagnoli's, bits reversed
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    table[byte] = crc;
  }
  return table;
}

template <class T>
void append_little_endian(std::string& out, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) out += static_cast<char>(value >> (8 * i) & 0xff);
}

// The wire format of Protocol Buffers: a key of field number and type, then the value.
class Message {
 public:
  Message& add(int field, double value) {
    key(field, 1);
    append_little_endian(bytes_, std::bit_cast<std::uint64_t>(value));
    return *this;
  }
  Message& add(int field, float value) {
    key(field, 5);
    append_little_endian(bytes_, std::bit_cast<std::uint32_t>(value));
    return *this;
  }
  Message& add(int field, std::int64_t value) {
    key(field, 0);
    varint(static_cast<std::uint64_t>(value));
    return *this;
  }
  Message& add(int field, std::string_view value) {
    key(field, 2);
    varint(value.size());
    bytes_ += value;
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  void key(int field, int type) { varint(static_cast<std::uint64_t>(field << 3 | type)); }
  void varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>(value | 0x80);
    bytes_ += static_cast<char>(value);
  }
  std::string bytes_;
};

// Of event.proto and summary.proto.
enum EventField { kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7 };
constexpr int kSummaryValue = 1, kValueTag = 1, kSimpleValue = 2, kSessionStatus = 1;
constexpr std::int64_t kStart = 1;

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  static constexpr std::array<std::uint32_t, 256> kTable = crc_table();
  std::uint32_t crc = 0xffffffff;
  for (const char c : bytes)
    crc = (crc >> 8) ^ kTable[(crc ^ static_cast<unsigned char>(c)) & 0xff];
  return ~crc;
}

std::uint32_t masked_crc32c(std::string_view bytes) {
  return std::rotr(crc32c(bytes), 15) + 0xa282ead8;
}

std::string tf_record(std::string_view bytes) {
  std::string out;
  append_little_endian(out, static_cast<std::uint64_t>(bytes.size()));
  append_little_endian(out, masked_crc32c(out));
  out += bytes;
  append_little_endian(out, masked_crc32c(bytes));
  return out;
}

std::string event_header(double wall_time, std::int64_t first_step) {
  const Message version = Message().add(kWallTime, wall_time).add(kFileVersion, "brain.Event:2");
  const Message session = Message().add(kSessionStatus, kStart);
  return tf_record(version.bytes()) + tf_record(Message()
                                                    .add(kWallTime, wall_time)
                                                    .add(kStep, first_step)
                                                    .add(kSessionLog, session.bytes())
                                                    .bytes());
}

std::string scalar_event(double wall_time, std::int64_t step, std::span<const Scalar> scalars) {
  Message summary;
  for (const Scalar& scalar : scalars) {
    const Message value =
        Message().add(kValueTag, scalar.tag).add(kSimpleValue, static_cast<float>(scalar.value));
    summary.add(kSummaryValue, value.bytes());
  }
  return tf_record(
      Message().add(kWallTime, wall_time).add(kStep, step).add(kSummary, summary.bytes()).bytes());
}

}  // namespace tessera::tools
