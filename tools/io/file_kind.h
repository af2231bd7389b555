// Well-known kinds of files, told by their first bytes: so that a file that is not what was asked
// for is refused with what it is and what makes the right thing of it.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera::tools {

struct FileKind {
  std::string_view name;        ///< "a gzip file"
  std::string_view as_data;     ///< what to do to train on what is in it
  std::string_view as_weights;  ///< what to do to read it as model.safetensors
  bool is_json = false, is_safetensors = false, is_page = false;

  /// Whether it is text, of whatever kind.
  bool is_text() const { return is_json || is_page; }

  /// ": " and what to do to get the file that this one packs or stands for, whatever that is; empty
  /// for a kind that does neither.
  std::string to_unpack() const;
};

/// How many bytes of a file file_kind() looks at.
inline constexpr std::size_t kFileKindNbytes = 512;

/// What a file is that begins with `head`; null: none of those known here, as text and token files.
const FileKind* file_kind(std::string_view head);
/// What the file at `path` is. Throws IoError when it cannot be read.
const FileKind* kind_of_file(const std::string& path);

}  // namespace tessera::tools
