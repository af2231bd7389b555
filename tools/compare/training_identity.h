// What decides the bits of a training besides its options and its program: what its data hold, and
// the arithmetic of the machine. A training is kept (--resume) only if one that is started today
// would have both alike.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>

#include "tools/compare/request/request.h"

namespace tessera::tools {

struct TrainingIdentity {
  std::string data_digest = {};  ///< see data_digest.h; empty: not known
  std::string arithmetic = {};   ///< see arithmetic.h, on the host of compare; empty: not known
};

/// The identities of trainings that start now. Data are read, and programs asked, once for all
/// configurations that have them in common.
class IdentityNow {
 public:
  /// `scratch`: a file that may be written and removed.
  explicit IdentityNow(std::string scratch) : scratch_(std::move(scratch)) {}

  /// Reads the data. Throws IoError.
  std::string data_digest(const Configuration& c);
  /// Starts this program, as a process chooses its CPU once. Throws IoError when that fails.
  std::string arithmetic(const Configuration& c);

 private:
  std::string scratch_;
  std::map<std::string, std::string> digests_, arithmetics_;
};

/// Why a training as `then` does not stand for one as `now`: "the data have changed"; empty if it
/// does.
std::string why_again(const TrainingIdentity& then, const TrainingIdentity& now);

/// The first argument of this program where IdentityNow has started it.
inline constexpr std::string_view kTellArithmetic = "--tell-arithmetic";
/// Says on stdout what arithmetic a training with these arguments has. Throws InvalidArgument.
void tell_arithmetic(std::span<const char* const> arguments);

}  // namespace tessera::tools
