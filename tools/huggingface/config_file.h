// config.json of a model folder, read key by key, and where its text is found.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::tools {

/// The longest config.json that is read.
inline constexpr std::int64_t kMaxConfigNbytes = 1 << 20;

/// The key of the metadata of weights that holds the text of their config.json.
inline constexpr const char* kConfigKey = "tessera.config.json";

/// What a save calls an older config.json while it replaces the model.
inline constexpr const char* kReplacedConfig = "config.json.replaced";

struct ConfigText {
  std::string text, path;
};

/// What a folder says of its model; see [Note: several files, one model] in model_writer.h. At
/// least one is there. Where both are, they should be of one model; alone, either is the model's.
struct FolderConfig {
  std::string folder;
  std::optional<ConfigText> file;   ///< config.json
  std::optional<ConfigText> saved;  ///< the copy in the weights, of when they were saved
};

/// Throws IoError as check_model_folder(), and for a folder without either.
FolderConfig read_folder_config(const std::string& folder);

/// For who reads what a model keeps besides config and weights: throws IoError for a folder in
/// which a save was cut short, as it may be another model's.
void check_save_ended(const std::string& folder);

/// Throws IoError, unless `is_same`, that config.json says another model than the weights were
/// saved with: `file` and not `saved` as `key`. `where`: what errors begin with, "gpt2".
void check_as_saved(bool is_same, const std::string& where, const char* key,
                    const std::string& file, const std::string& saved, const FolderConfig& folder);

/// A config.json with typed access; errors name the file and the key.
class ConfigFile {
 public:
  /// `where`: what errors begin with, "gpt2". Throws IoError unless `config` is a JSON object.
  ConfigFile(const ConfigText& config, std::string where);

  bool has(const char* key) const { return json_.contains(key); }
  /// False if the key is missing.
  bool is_null(const char* key) const { return has(key) && json_.at(key).is_null(); }
  /// In [1, 2^24].
  std::int64_t integer(const char* key) const;
  /// In [min, end): `unless_there` when the key is missing.
  double number(const char* key, double unless_there, double min, double end) const;
  /// In [min, end).
  double required_number(const char* key, double min, double end) const;
  /// Throws IoError unless `ok`: expected the key to be `what`, got its value.
  void require(bool ok, const char* key, std::string_view what) const;
  /// The value of a key that is an object: its errors name the key as well.
  ConfigFile object(const char* key) const;
  /// Throws IoError unless the key is missing or null, or a list of nothing but `supported`.
  void all_of(const char* key, const nlohmann::json& supported) const;
  /// One of `supported`: the first of them when the key is missing.
  nlohmann::json one_of(const char* key, std::initializer_list<nlohmann::json> supported) const;

 private:
  ConfigFile(std::string path, std::string where, nlohmann::json json);
  void require_there(const char* key) const;

  std::string path_, where_;
  nlohmann::json json_;
};

/// What config.json calls its kind of model; empty where it does not say. Throws as ConfigFile.
std::string model_type(const ConfigText& config);

}  // namespace tessera::tools
