// What libtessera_gloo.so does for Tessera, in plain types: neither exceptions nor classes of the
// standard library cross from one to the other, so they need not come from one compiler.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::comm::gloo_plugin {

struct Mesh;     ///< connections to all other processes
struct Message;  ///< one on its way

/// Why a function failed.
struct ErrorText {
  char text[1024];
};

enum class Outcome : int { kDone, kPending, kFailed };

/// Tags on the wire have a bit more than Transport's, the rest of Gloo's 64 bits is the length.
inline constexpr int kTagBits = 23;
inline constexpr std::uint64_t kMaxMessageNbytes = (std::uint64_t{1} << (64 - kTagBits)) - 2;

/// No function throws. Those that return a pointer return nullptr when they fail.
struct Functions {
  /// Grows with every change of what is below.
  static constexpr std::uint32_t kVersion = 2;
  std::uint32_t version;
  const char* gloo_version;

  /// Listens at a numeric address of this machine. `connect_ms` is for each connect().
  Mesh* (*open)(const char* address, int process, int num_processes, std::int64_t connect_ms,
                ErrorText* error);
  /// What all others need in order to connect. Lives as long as the mesh.
  const char* (*addresses)(Mesh* mesh);
  /// Connects to a process, whose addresses() are `theirs`. To one after the other, in any order.
  bool (*connect)(Mesh* mesh, int process, const char* theirs, ErrorText* error);
  /// Breaks all connections, from any thread: connect() and wait() in others end, and fail.
  void (*interrupt)(Mesh* mesh);
  /// Breaks all connections, and frees the mesh. Messages can still be asked, and must still be
  /// dropped.
  void (*close)(Mesh* mesh);

  Message* (*send)(Mesh* mesh, int process, std::uint32_t tag, const void* bytes,
                   std::size_t nbytes, ErrorText* error);
  Message* (*receive)(Mesh* mesh, int process, std::uint32_t tag, void* bytes, std::size_t nbytes,
                      ErrorText* error);
  Outcome (*wait)(Message* message, std::int64_t ms, ErrorText* error);
  /// Frees a message and lets go of its bytes; false if Gloo still needs both.
  bool (*try_drop)(Message* message);
};

/// The one symbol of the plug-in: a function that returns Functions.
inline constexpr const char* kEntry = "tessera_gloo_plugin";
using Entry = const Functions* (*)();

}  // namespace tessera::comm::gloo_plugin
