// Ranks as messages name them.
#pragma once

#include <string>
#include <vector>

namespace tessera::comm {

/// "rank 2", "ranks 2, 5-7" or, when there are too many of these, "ranks 2, 5-7 and 90 more".
/// `ranks` ascend.
std::string ranks_text(const std::vector<int>& ranks);

}  // namespace tessera::comm
