// Unicode's normal forms, by ICU.
#pragma once

#include <memory>
#include <string>
#include <string_view>

// Of ICU, whose namespace has the version in its name.
#include <unicode/normalizer2.h>
#include <unicode/uniset.h>

namespace tessera::tools {

/// One of NFC, NFD, NFKC and NFKD, of the characters that Unicode 9 has; later ones stay as they
/// are. So do the tokenizers of Hugging Face, whose tables are those of Unicode 9: other ids than
/// a model was trained with would be of no use. It can be copied, and used by any number of
/// threads.
class NormalForm {
 public:
  /// Whether `name` is one of the four.
  static bool is_known(std::string_view name);
  /// Throws IoError when ICU lacks its data.
  explicit NormalForm(std::string_view name);

  /// `text`, which must be UTF-8 of less than 2 GiB.
  std::string normalized(std::string_view text) const;

 private:
  std::shared_ptr<const icu::UnicodeSet> known_;
  const icu::Normalizer2* of_all_ = nullptr;  // ICU's
};

}  // namespace tessera::tools
