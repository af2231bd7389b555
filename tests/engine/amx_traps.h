// The tile instructions of AMX on a CPU of the same kind that has none: there each of them is
// illegal, and the signal's handler does what it stands for. For tests of code that writes them.
#pragma once

namespace tessera::engine {

/// Handles SIGILL from now on, for all threads, each of which has tiles of its own. Knows what
/// AmxTiles may use: ldtilecfg, sttilecfg, tilezero, tileloadd, tilestored, tdpbf16ps, tilerelease.
/// What the Intel SDM (volume 2, "Intel AMX Instruction Set Reference") makes a fault ends the
/// program with a message: a configuration with reserved bits, a tile that has no shape, shapes
/// that do not fit each other, any other instruction. A microsecond or more each.
void trap_tile_instructions();

}  // namespace tessera::engine
