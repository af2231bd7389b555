// Table lookup: tokens to rows of a matrix, alone or with the position table of GPT-2 added.
#pragma once

#include "engine/tape.h"

namespace tessera::ops {

/// y[.., :] = table[tokens[..], :].
///   tokens (..) i32, up to 4 dimensions; table (V, C) f32 or bf16 -> y (.., C) like the table.
///   Backward adds the rows of dy into the table's gradient in the order of the tokens, in f32 with
///   one rounding per element; rows that no token names are zero. Saves tokens.
///   Throws InvalidArgument for a token outside [0, V), naming it, its position and V. A kernel
///   cannot throw: on a GPU the row of such a token is NaN and it has no gradient.
engine::Tensor embedding(engine::Tape& tape, const engine::Tensor& tokens,
                         engine::Parameter& table);

/// y[b, t, :] = wte[tokens[b, t], :] + wpe[t, :].
///   tokens (B, T) i32; wte (V, C), wpe (at least T, C), of one dtype -> y (B, T, C) of that dtype.
///   Backward, saved tensors and errors as for embedding(); also throws if T exceeds the rows of
///   wpe.
engine::Tensor token_position_embedding(engine::Tape& tape, const engine::Tensor& tokens,
                                        engine::Parameter& wte, engine::Parameter& wpe);

}  // namespace tessera::ops
