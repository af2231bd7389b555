// The collectives as messages and sums. Private to comm.
#pragma once

#include "comm/messages/messages.h"
#include "comm/process_group.h"

namespace tessera::comm {

/// This rank's share of `c`, on memory of the host, once its ranks have met. `staging`: at least
/// staging_nbytes() of them; undefined for none. Returns once its tensors are as they will be and
/// nothing more is read from them. Throws CommError.
void carry_out(const Collective& c, const Tensor& staging, int rank, int size, Messages& messages);

/// Throws InvalidArgument unless `c`, of rank `rank` of the world, is on memory of the host.
void check_on_host(const Collective& c, const Stream& stream, int rank);

}  // namespace tessera::comm
