// The collectives as messages and sums. Private to comm.
#pragma once

#include "comm/messages/message_rank.h"
#include "comm/process_group.h"

namespace tessera::comm {

/// This rank's share of `c`, on memory of the host, once its ranks have met. `staging`: at least
/// staging_nbytes() of them; undefined for none. Returns once its tensors are as they will be and
/// nothing more is read from them. Throws CommError.
void carry_out(const Collective& c, const Tensor& staging, int rank, int size,
               MessageRank::Messages& messages);

}  // namespace tessera::comm
