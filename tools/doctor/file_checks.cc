#include "tools/doctor/file_checks.h"
#include "tools/config/data/data_path.h"

#include <fmt/format.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <span>
#include <system_error>

#include "engine/error.h"
#include "engine/io/file.h"
#include "tools/cli/flags.h"
#include "tools/config/data/default_data.h"
#include "tools/config/train_config.h"
#include "tools/data/fashion_mnist.h"
#include "tools/data/token_file.h"
#include "tools/report/step_text.h"

namespace tessera::tools {
namespace {

std::filesystem::path whole_path(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::absolute(path, ignored).lexically_normal();
}

std::filesystem::path nearest_folder(std::filesystem::path folder) {
  std::error_code error;
  while (!std::filesystem::exists(folder, error) && folder.has_relative_path()) {
    folder = folder.parent_path();
  }
  return folder;
}

// Throws if what is missing of `path` cannot be made in `folder`.
void check_names(const std::filesystem::path& path, const std::filesystem::path& folder) {
  const auto longest = static_cast<std::int64_t>(::pathconf(folder.c_str(), _PC_NAME_MAX));
  for (const std::filesystem::path& name : path.lexically_relative(folder)) {
    const std::int64_t nbytes = std::ssize(name.native());
    engine::require<engine::IoError>(longest < 0 || nbytes <= longest,
                                     "[out] expected names of at most {} bytes, got one of {} ({})",
                                     longest, nbytes, path.string());
  }
}

// `option`: what --data.path says. Where nothing is given the error ends with how to get some,
// which is the fix.
void fail_data(Check& check, const engine::IoError& error, const std::string& option,
               std::string_view how_to_get, std::string_view other) {
  const std::string found = error.what(), end = fmt::format("; {}", how_to_get);
  check.verdict = Verdict::kFail;
  check.found = found.substr(0, found.ends_with(end) ? found.size() - end.size() : found.size());
  check.fix = option.empty() ? how_to_get : other;
}

}  // namespace

Check check_text(const std::string& option) {
  constexpr std::int64_t kVocab = 256, kUnknownVocab = std::int64_t{1} << 31;
  Check check{.name = "text"};
  try {
    const std::string path = data_path(option, kDefaultText, kHowToGetText);
    const TokenFile file(path);
    file.check_tokens(file.format() == "text" ? kVocab : kUnknownVocab);
    check.found = fmt::format("{}: {}, {} tokens", path, file.format(), file.num_tokens());
    check.facts.add("path", path).add("tokens", file.num_tokens());
  } catch (const engine::IoError& error) {
    fail_data(check, error, option, kHowToGetText,
              "give --data.path=FILE of text or of token ids, as docs/data.md says; without it "
              "`bazel run` supplies a text");
  }
  return check;
}

Check check_images(const std::string& option) {
  Check check{.name = "images"};
  try {
    const std::string path = data_path(option, kDefaultImages, kHowToGetImages);
    const FashionMnist data = load_fashion_mnist(path);
    check.found = fmt::format("{}: {} training and {} test images", path, data.train.num_images,
                              data.test.num_images);
    check.facts.add("path", path).add("images", data.train.num_images);
  } catch (const engine::IoError& error) {
    fail_data(
        check, error, option, kHowToGetImages,
        "give --data.path=FOLDER that has the four IDX files, with or without .gz; without it "
        "`bazel run` supplies images");
  }
  return check;
}

Check check_out(const std::string& path, std::int64_t wanted_nbytes) {
  Check check{.name = "output"};
  check.facts.add("path", path);
  const std::filesystem::path whole = whole_path(path), folder = nearest_folder(whole);
  try {
    engine::require<engine::IoError>(std::filesystem::is_directory(folder),
                                     "[out] expected a folder, got something else ({})",
                                     folder.string());
    check_names(whole, folder);
    // Never given its name, so removed.
    engine::AtomicFile probe((folder / "tessera_doctor_probe").string());
    constexpr std::array<std::byte, 4096> kBytes{};
    probe.write(kBytes);
    probe.flush();
  } catch (const engine::IoError& error) {
    check.verdict = Verdict::kFail;
    check.found = error.what();
    check.fix = "give --out=FOLDER where you may write and there is room";
    return check;
  }
  struct statvfs system {};
  if (::statvfs(folder.c_str(), &system) != 0) {
    check.found = path + " can be written to";
    return check;
  }
  const auto free_nbytes = static_cast<std::int64_t>(system.f_bavail * system.f_frsize);
  check.found = fmt::format("{} can be written to, {} free", path,
                            nbytes_text(static_cast<double>(free_nbytes)));
  check.facts.add("free_bytes", free_nbytes);
  if (free_nbytes < wanted_nbytes) {
    check.verdict = Verdict::kWarn;
    check.fix = fmt::format("make room for the {} of a saved model, or give --out=FOLDER elsewhere",
                            nbytes_text(static_cast<double>(wanted_nbytes)));
  }
  return check;
}

}  // namespace tessera::tools
