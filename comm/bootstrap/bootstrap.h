// How processes that know nothing of each other get their first bytes: rank 0 hands a message to
// all ranks, at a place they were all told.
//
//   file:PATH      a file on a disk that all ranks see. Each rank r > 0 leaves PATH.r with a number
//                  it drew; rank 0 answers in PATH with all of these numbers, so nobody takes what
//                  another run left behind. Files are private (0600), appear whole, are refused if
//                  they are not the user's own plain files, and are gone afterwards. The folder is
//                  refused if it is another user's, or if others may write there and it is not
//                  sticky.
//   tcp:HOST:PORT  rank 0 listens there. Anyone who can connect gets the message: for networks in
//                  which everyone may.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm {

/// `message` of rank 0, at most 4096 bytes, on every rank; other ranks' messages are not looked at.
/// Throws InvalidArgument for an address or rank that makes no sense; IoError for a file or socket
/// that fails or is not what it must be; CommError after the deadline, where rank 0 names who is
/// missing, or if ranks are not of one world.
std::vector<std::byte> bootstrap(std::string_view address, int rank, int size,
                                 std::vector<std::byte> message,
                                 std::chrono::milliseconds deadline);

}  // namespace tessera::comm
