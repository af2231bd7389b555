// Where other processes reach this one. Private to comm.
#pragma once

#include <chrono>
#include <string>

namespace tessera::comm {

/// As a number: `host` is an address of this machine, a name that stands for one, or a network
/// interface. Empty: the address of the default route, else of the first interface that is up, else
/// 127.0.0.1. Throws InvalidArgument for what is no address of this machine, with those that are:
/// a name server that does not answer until `deadline` knows none.
std::string own_address(const std::string& host, std::chrono::steady_clock::time_point deadline);

}  // namespace tessera::comm
