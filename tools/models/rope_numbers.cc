#include "tools/models/rope_numbers.h"

#include <algorithm>
#include <cstddef>
#include <iterator>

#include "engine/error.h"

namespace tessera::tools {

using engine::require;

namespace {

constexpr const char* kTypes[] = {"default", "linear", "llama3"};  // by number

}  // namespace

std::vector<ModelFamily::Number> rope_numbers() {
  return {{"rope_scaling"}, {"rope_factor"}, {"rope_low"}, {"rope_high"}, {"rope_positions"}};
}

std::map<std::string, double> numbers_of(const RopeFileScaling& scaling) {
  const auto type = std::ranges::find(kTypes, scaling.type) - std::begin(kTypes);
  return {{"rope_scaling", static_cast<double>(type)},
          {"rope_factor", scaling.factor},
          {"rope_low", scaling.low},
          {"rope_high", scaling.high},
          {"rope_positions", scaling.original_positions}};
}

RopeFileScaling rope_scaling_of(const std::map<std::string, double>& numbers) {
  const double type = numbers.at("rope_scaling");
  require(type == 0 || type == 1 || type == 2, "[model] expected rope_scaling of 0 to 2, got {}",
          type);
  return {.type = kTypes[static_cast<std::size_t>(type)],
          .factor = numbers.at("rope_factor"),
          .low = numbers.at("rope_low"),
          .high = numbers.at("rope_high"),
          .original_positions = numbers.at("rope_positions")};
}

void check_rotation(const FileRotation& rotation, const std::string& where) {
  require(rotation.theta >= 1 && rotation.theta <= 1e12,
          "[{}] expected rope_theta in [1, 1e12], got {}", where, rotation.theta);
  const RopeFileScaling& s = rotation.scaling;
  require(s.factor >= 1 && s.original_positions >= 0 && s.low > 0 && s.low < s.high,
          "[{}] expected rope_factor of at least 1 and 0 < rope_low < rope_high, got {}, {} and {}",
          where, s.factor, s.low, s.high);
}

ops::RopeScaling ops_scaling(const RopeFileScaling& scaling) {
  if (scaling.type == "linear") return {.factor = scaling.factor};
  if (scaling.type != "llama3") return {};
  return {.factor = scaling.factor,
          .original_positions = scaling.original_positions,
          .low = scaling.low,
          .high = scaling.high};
}

}  // namespace tessera::tools
