// What slows rotations, as families keep it among the numbers of a ModelConfig.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "ops/rope.h"
#include "tools/huggingface/rotation.h"
#include "tools/models/family.h"

namespace tessera::tools {

/// rope_scaling, rope_factor, rope_low, rope_high, rope_positions.
std::vector<ModelFamily::Number> rope_numbers();

std::map<std::string, double> numbers_of(const RopeFileScaling& scaling);
/// The scaling that numbers_of() makes `numbers` of. Throws InvalidArgument for a rope_scaling that
/// is none.
RopeFileScaling rope_scaling_of(const std::map<std::string, double>& numbers);

/// Throws InvalidArgument, beginning with `where`, for what ops::rope() does not take.
void check_rotation(const FileRotation& rotation, const std::string& where);
/// As ops::rope() has it.
ops::RopeScaling ops_scaling(const RopeFileScaling& scaling);

}  // namespace tessera::tools
