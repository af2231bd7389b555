// How tests steer and inspect the emulated NCCL: the functions of <nccl.h> that the engine uses,
// between threads and processes of one host, over emulated streams; equal numbers of devices are
// one GPU in all processes that have one Settings::host. A program that links it finds it as "the
// NCCL of this process", if its symbols are exported (-rdynamic).
//
// As the real one with blocking = 0: calls answer ncclInProgress, and nothing lies on a stream
// before a poll has said ncclSuccess; a collective ends when the streams of all ranks have come to
// it, and sums in the type of its inputs (f32 or bf16) and in an order of its own (a tree that
// begins at the receiver, so not the canonical one from 3 ranks on). A rank that does not come
// leaves the others hanging until they abort.
#pragma once

#include <nccl.h>

#include <cstdint>

namespace tessera::cuda_emulation {

/// As in a new process: no faults planned, the toolkit's version. Communicators stay.
void reset_nccl();

/// What ncclGetVersion says.
void set_nccl_version(int version);

/// The nth operation (1: the next; a group of sends and receives is one) of rank `rank` of any
/// communicator from now never takes place: its stream hangs there. With an `error`, which is what
/// ncclCommGetAsyncError of its communicator says from then on.
void fail_nccl(int rank, int nth, ncclResult_t error);
void silence_nccl(int rank, int nth);

/// From now on this process is not told when another one of a communicator is lost, as over NVLink.
/// Else its calls fail with ncclRemoteError, as over a network.
void ignore_lost_processes();

/// Communicators that were made and neither destroyed nor aborted.
int live_communicators();
/// Communicators that were aborted since reset_nccl().
int aborted_communicators();
/// Bytes that all ranks have handed over since reset_nccl(), to be sent or summed: inputs once
/// each, a message to oneself counts.
std::int64_t nccl_nbytes();

}  // namespace tessera::cuda_emulation
