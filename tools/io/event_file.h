// The files that TensorBoard reads: scalars by tag and step.
//
//   text += event_header(now);                                    // first in the file
//   text += scalar_event(now, step, {{"train/loss", 2.5}});
//
// [Note: event files] A file is a row of TFRecords (length, masked CRC32C of the length, bytes,
// masked CRC32C of the bytes), each an Event message of Protocol Buffers. Of Event we need four
// fields (wall time, step, file version, summary) and of Summary a tag and a float: sixty lines,
// less than the generated code, the .proto files and the compiler that libprotobuf-dev would bring
// into the build. That TensorBoard itself reads them is checked by
// tests/golden/check_event_file.py.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace tessera::tools {

/// CRC-32C (Castagnoli), as of iSCSI: of "123456789" it is 0xe3069283.
std::uint32_t crc32c(std::string_view bytes);
/// What TFRecords store of it: CRCs of data that holds CRCs are weak.
std::uint32_t masked_crc32c(std::string_view bytes);
/// `bytes` as one record.
std::string tf_record(std::string_view bytes);

struct Scalar {
  std::string_view tag;  ///< "train/loss": what is before the slash makes a group; UTF-8
  double value;          ///< stored as f32, NaN and infinities as they are
};

/// The records that a file begins with: its version, and that a session starts at `first_step`, so
/// that what an earlier file in the folder says from there on counts no more. Seconds since 1970.
std::string event_header(double wall_time, std::int64_t first_step);
/// A record of scalars of one step.
std::string scalar_event(double wall_time, std::int64_t step, std::span<const Scalar> scalars);

}  // namespace tessera::tools
