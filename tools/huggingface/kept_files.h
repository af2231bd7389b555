// What a model that is saved keeps of the folder that it came from: what config.json says more,
// such as the ids of its first and last token, and the files of its tokenizer, of which training
// knows nothing.
#pragma once

#include <string>
#include <vector>

namespace tessera::tools {

struct KeptFiles {
  struct File {
    std::string name;  ///< in the folder
    std::string content;
  };

  std::string config_text;  ///< of config.json; empty: there is none
  std::vector<File> files;
};

/// What `folder` has of such files; an empty name: none. Throws IoError naming a file that cannot
/// be read, or has more than 256 MiB.
KeptFiles read_kept_files(const std::string& folder);

/// Names of files of a tokenizer that are in `folder` and not among `kept`.
std::vector<std::string> other_kept_files(const std::string& folder, const KeptFiles& kept);

/// `own`, the config.json of a model, with the keys that only `kept` has, and with the ids of
/// tokens (eos_token_id, ...) that `kept` has; `own` itself where there are none, or `kept` is
/// empty. Throws IoError if either is no JSON object.
std::string with_kept_keys(const std::string& own, const std::string& kept);

}  // namespace tessera::tools
