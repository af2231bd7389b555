#include "tools/tokenizer/text/normal_form.h"

#include <unicode/bytestream.h>

#include <cstdint>

#include "engine/error.h"

namespace tessera::tools {
namespace {

void check(UErrorCode error) {
  engine::require<engine::IoError>(U_SUCCESS(error) != 0,
                                   "[tokenizer] expected ICU to normalize a text, got {}",
                                   u_errorName(error));
}

}  // namespace

bool NormalForm::is_known(std::string_view name) {
  return name == "NFC" || name == "NFD" || name == "NFKC" || name == "NFKD";
}

NormalForm::NormalForm(std::string_view name) {
  UErrorCode error = U_ZERO_ERROR;
  of_all_ = name == "NFC"    ? icu::Normalizer2::getNFCInstance(error)
            : name == "NFD"  ? icu::Normalizer2::getNFDInstance(error)
            : name == "NFKC" ? icu::Normalizer2::getNFKCInstance(error)
                             : icu::Normalizer2::getNFKDInstance(error);
  check(error);
  auto known = std::make_shared<icu::UnicodeSet>(icu::UnicodeString("[:age=9.0:]"), error);
  check(error);
  known->freeze();
  known_ = std::move(known);
}

std::string NormalForm::normalized(std::string_view text) const {
  UErrorCode error = U_ZERO_ERROR;
  std::string out;
  out.reserve(text.size());
  icu::StringByteSink<std::string> sink(&out);
  const icu::FilteredNormalizer2 of_known(*of_all_, *known_);
  of_known.normalizeUTF8(0, icu::StringPiece(text.data(), static_cast<std::int32_t>(text.size())),
                         sink, nullptr, error);
  check(error);
  return out;
}

}  // namespace tessera::tools
