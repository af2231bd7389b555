#include "tools/huggingface/rotation.h"

#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>

#include "engine/io/json.h"

namespace tessera::tools {

using engine::json_literal;

namespace {

constexpr double kMinTheta = 1, kMaxTheta = 1e12, kMaxFactor = 1e6;
constexpr const char* kTheta = "rope_theta";
constexpr const char* kPart = "partial_rotary_factor";

bool is_there(const ConfigFile& file, const char* key) {
  return file.has(key) && !file.is_null(key);
}

// `file`: where rope_scaling or rope_parameters stands.
RopeFileScaling read_scaling(const ConfigFile& scaled, const ConfigFile& file) {
  RopeFileScaling scaling;
  // Before transformers 4.45 the key was `type`.
  const char* const key = scaled.has("rope_type") ? "rope_type" : "type";
  scaling.type = scaled.one_of(key, {"default", "linear", "llama3"}).get<std::string>();
  if (scaling.type == "default") return scaling;
  scaling.factor = scaled.required_number("factor", 1, kMaxFactor);
  if (scaling.type == "linear") return scaling;
  constexpr double kSmallest = 1e-6;
  scaling.low = scaled.required_number("low_freq_factor", kSmallest, kMaxFactor);
  scaling.high = scaled.required_number("high_freq_factor", scaling.low, kMaxFactor);
  scaled.require(scaling.low < scaling.high, "high_freq_factor", "above low_freq_factor");
  const std::int64_t positions = scaled.integer("original_max_position_embeddings");
  file.one_of("original_max_position_embeddings", {positions});  // transformers prefers that one
  scaling.original_positions = static_cast<double>(positions);
  return scaling;
}

double read_part(const ConfigFile& file, const char* key, double unless_there,
                 bool may_be_partial) {
  if (!may_be_partial) return file.one_of(key, {1.0}).get<double>();
  const double part = file.number(key, unless_there, 0, kMaxFactor);
  file.require(part > 0 && part <= 1, key, "above 0 and at most 1");
  return part;
}

}  // namespace

// Versions of transformers look for the rotation in different places: in all that there are it must
// be the same one.
FileRotation read_rotation(const ConfigFile& file, const RotationKeys& keys) {
  const bool has_scaling = is_there(file, "rope_scaling");
  FileRotation rotation;
  rotation.part = read_part(file, keys.part, keys.part_unless_there, keys.may_be_partial);
  rotation.theta = file.number(keys.theta, rotation.theta, kMinTheta, kMaxTheta);
  if (has_scaling) {
    const ConfigFile own = file.object("rope_scaling");
    rotation.scaling = read_scaling(own, file);
    own.one_of(kPart, {rotation.part});
    own.one_of(kTheta, {rotation.theta});
  }
  if (!is_there(file, "rope_parameters")) return rotation;
  const ConfigFile own = file.object("rope_parameters");
  const double part = read_part(own, kPart, rotation.part, keys.may_be_partial);
  const RopeFileScaling scaling = read_scaling(own, file);
  own.require(!has_scaling || scaling == rotation.scaling, "rope_type", "as in rope_scaling");
  // Versions that take rope_scaling pass rope_parameters over.
  own.require(!(has_scaling || file.has(keys.part)) || part == rotation.part, kPart,
              "as it is outside of rope_parameters");
  const bool has_theta = own.has(kTheta) || !file.has(keys.theta);
  const double theta =
      has_theta ? own.required_number(kTheta, kMinTheta, kMaxTheta) : rotation.theta;
  own.require(!(has_scaling || file.has(keys.theta)) || theta == rotation.theta, kTheta,
              "as it is outside of rope_parameters");
  return {.theta = theta, .part = part, .scaling = scaling};
}

std::string rope_scaling_text(const RopeFileScaling& scaling) {
  if (scaling.type == "default") return "null";
  std::string text = fmt::format("{{\"rope_type\": {}, \"factor\": {}", json_literal(scaling.type),
                                 json_literal(scaling.factor));
  if (scaling.type == "llama3") {
    text += fmt::format(
        ", \"low_freq_factor\": {}, \"high_freq_factor\": {}, "
        "\"original_max_position_embeddings\": {}",
        json_literal(scaling.low), json_literal(scaling.high),
        static_cast<std::int64_t>(scaling.original_positions));
  }
  return text + "}";
}

void check_as_saved(const FileRotation& got, const FileRotation& saved, const std::string& where,
                    const RotationKeys& keys, const FolderConfig& folder) {
  const auto check = [&](const char* key, const auto& now, const auto& then) {
    check_as_saved(now == then, where, key, fmt::to_string(now), fmt::to_string(then), folder);
  };
  check(keys.theta, got.theta, saved.theta);
  check(keys.part, got.part, saved.part);
  check("rope_type", got.scaling.type, saved.scaling.type);
  check("factor", got.scaling.factor, saved.scaling.factor);
  check("low_freq_factor", got.scaling.low, saved.scaling.low);
  check("high_freq_factor", got.scaling.high, saved.scaling.high);
  check("original_max_position_embeddings", got.scaling.original_positions,
        saved.scaling.original_positions);
}

}  // namespace tessera::tools
