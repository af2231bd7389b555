// The files that a model is trained on: --data.mix.
#pragma once

#include <string>
#include <vector>

namespace tessera::tools {

/// A file of a mix.
struct TokenSource {
  std::string path;
  double weight = 1;
};

/// The sources of --data.mix, whose paths may begin with ~. Throws InvalidArgument naming the
/// option for what is none: no weight, one that is not above 0, a file twice.
std::vector<TokenSource> parse_mix(const std::string& mix);
/// What parse_mix() reads as these.
std::string mix_option(const std::vector<TokenSource>& sources);

}  // namespace tessera::tools
