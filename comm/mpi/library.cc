#include "comm/mpi/library.h"

#include <dlfcn.h>

#include <sstream>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "comm/mpi/abi.h"
#include "engine/error.h"

namespace tessera::comm {
namespace {

using engine::CommError;
using engine::DeviceError;

constexpr int kProbeTag = static_cast<int>(Transport::kNumTags);  // which no message has

void* find(void* library, const char* name, const std::string& where) {
  void* symbol = dlsym(library, name);
  engine::require<DeviceError>(symbol != nullptr,
                               "[mpi] expected {} to have {}, got no such symbol", where, name);
  return symbol;
}

template <class F>
void find(void* library, const char* name, const std::string& where, F& function) {
  function = reinterpret_cast<F>(find(library, name, where));
}

// "Open MPI 4.1.4" of "Open MPI v4.1.4, package: ...", "MPICH 4.0.2" of "MPICH
// Version:\t4.0.2\n...".
std::string short_name(std::string_view version) {
  std::istringstream words{std::string(version.substr(0, version.find_first_of(",\n")))};
  std::string name;
  for (std::string word; words >> word;) {
    if (word == ":" || word == "Version" || word == "Version:") continue;
    if (word.size() > 1 && word[0] == 'v' && word[1] >= '0' && word[1] <= '9') word.erase(0, 1);
    name += (name.empty() ? "" : " ") + word;
  }
  return name;
}

std::string version_of(void* library, const std::string& where) {
  int (*get_version)(char*, int*) = nullptr;
  find(library, "MPI_Get_library_version", where, get_version);
  std::vector<char> text(kMpiMaxText);
  int length = 0;
  engine::require<DeviceError>(get_version(text.data(), &length) == 0,
                               "[mpi] expected {} to tell its version, got an error", where);
  return text.data();
}

template <class Handle>
class LibraryOf final : public MpiLibrary {
 public:
  LibraryOf(const MpiAbi<Handle>& abi, void* library, const std::string& where, std::string name)
      : abi_(abi), name_(std::move(name)) {
    find(library, "MPI_Init_thread", where, init_thread_);
    find(library, "MPI_Initialized", where, initialized_);
    find(library, "MPI_Finalized", where, finalized_);
    find(library, "MPI_Query_thread", where, query_thread_);
    find(library, "MPI_Finalize", where, finalize_);
    find(library, "MPI_Comm_rank", where, comm_rank_);
    find(library, "MPI_Comm_size", where, comm_size_);
    find(library, "MPI_Comm_dup", where, comm_dup_);
    find(library, "MPI_Comm_set_errhandler", where, comm_set_errhandler_);
    find(library, "MPI_Comm_get_attr", where, comm_get_attr_);
    find(library, "MPI_Isend", where, isend_);
    find(library, "MPI_Improbe", where, improbe_);
    find(library, "MPI_Imrecv", where, imrecv_);
    find(library, "MPI_Test", where, test_);
    find(library, "MPI_Iprobe", where, iprobe_);
    find(library, "MPI_Get_count", where, get_count_);
    find(library, "MPI_Error_string", where, error_string_);
  }

  std::string name() const override { return name_; }
  int process() const override { return process_; }
  int num_processes() const override { return num_processes_; }

  void start() override {
    int started = 0, ended = 0, level = 0;
    check(finalized_(&ended), "MPI_Finalized");
    engine::require<CommError>(ended == 0,
                               "[mpi] expected MPI not to have ended in this process, "
                               "got MPI_Finalized ({}: it starts once)",
                               name_);
    check(initialized_(&started), "MPI_Initialized");
    if (started != 0) {
      check(query_thread_(&level), "MPI_Query_thread");
      engine::require<CommError>(
          level >= abi_.thread_multiple,
          "[mpi] expected MPI not to be in use, or with MPI_THREAD_MULTIPLE, "
          "got thread level {} ({}: one transport in a process)",
          level, name_);
    } else {
      check(init_thread_(nullptr, nullptr, abi_.thread_serialized, &level), "MPI_Init_thread");
      engine::require<CommError>(level >= abi_.thread_serialized,
                                 "[mpi] expected MPI_THREAD_SERIALIZED, got thread level {} ({})",
                                 level, name_);
      started_here_ = true;
      check(comm_set_errhandler_(abi_.comm_world, abi_.errors_return), "MPI_Comm_set_errhandler");
    }
    int* tag_ub = nullptr;
    int has_tag_ub = 0;
    check(comm_get_attr_(abi_.comm_world, abi_.tag_ub, &tag_ub, &has_tag_ub), "MPI_Comm_get_attr");
    engine::require<CommError>(has_tag_ub != 0 && *tag_ub >= kProbeTag,
                               "[mpi] expected tags to {}, got to {} ({})", kProbeTag,
                               has_tag_ub != 0 ? *tag_ub : 0, name_);
    check(comm_dup_(abi_.comm_world, &comm_), "MPI_Comm_dup");
    check(comm_set_errhandler_(comm_, abi_.errors_return), "MPI_Comm_set_errhandler");
    check(comm_rank_(comm_, &process_), "MPI_Comm_rank");
    check(comm_size_(comm_, &num_processes_), "MPI_Comm_size");
  }

  int isend(const std::byte* data, int nbytes, int process, int tag, Request& request) override {
    Handle handle{};
    const int code = isend_(data, nbytes, abi_.byte, process, tag, comm_, &handle);
    request = to_number(handle);
    return code;
  }

  int improbe(int process, int tag, bool& found, Arrival& arrival, int& nbytes) override {
    Handle handle{};
    MpiStatus status{};
    int flag = 0;
    int code = improbe_(process, tag, comm_, &flag, &handle, &status);
    arrival = to_number(handle);
    found = flag != 0;
    if (code == 0 && found) code = get_count_(&status, abi_.byte, &nbytes);
    return code;
  }

  int irecv(std::byte* data, int nbytes, Arrival& arrival, Request& request) override {
    Handle message = to_handle(arrival), handle{};
    const int code = imrecv_(data, nbytes, abi_.byte, &message, &handle);
    arrival = to_number(message);
    request = to_number(handle);
    return code;
  }

  int test(Request& request, bool& done) override {
    Handle handle = to_handle(request);
    MpiStatus status{};
    int flag = 0;
    const int code = test_(&handle, &flag, &status);
    request = to_number(handle);
    done = flag != 0;
    return code;
  }

  // A probe that finds nothing makes progress, by MPI's own rules.
  void progress() override {
    MpiStatus status{};
    int found = 0;
    iprobe_(abi_.any_source, kProbeTag, comm_, &found, &status);
  }

  void finish() override {
    if (started_here_) finalize_();
  }

  std::string error_text(int code) const override {
    std::vector<char> text(kMpiMaxText);
    int length = 0;
    if (error_string_(code, text.data(), &length) != 0) return fmt::format("error {}", code);
    return text.data();
  }

 private:
  static Handle to_handle(std::uintptr_t number) {
    if constexpr (std::is_pointer_v<Handle>) {
      return reinterpret_cast<Handle>(number);
    } else {
      return static_cast<Handle>(number);
    }
  }
  static std::uintptr_t to_number(Handle handle) {
    if constexpr (std::is_pointer_v<Handle>) {
      return reinterpret_cast<std::uintptr_t>(handle);
    } else {
      return static_cast<std::uintptr_t>(handle);
    }
  }

  void check(int code, const char* function) const {
    engine::require<CommError>(code == 0, "[mpi] expected {} to succeed, got: {} ({})", function,
                               code != 0 ? error_text(code) : "", name_);
  }

  const MpiAbi<Handle> abi_;
  const std::string name_;
  Handle comm_{};
  int process_ = 0, num_processes_ = 1;
  bool started_here_ = false;

  int (*init_thread_)(int*, char***, int, int*);
  int (*initialized_)(int*);
  int (*finalized_)(int*);
  int (*query_thread_)(int*);
  int (*finalize_)();
  int (*comm_rank_)(Handle, int*);
  int (*comm_size_)(Handle, int*);
  int (*comm_dup_)(Handle, Handle*);
  int (*comm_set_errhandler_)(Handle, Handle);
  int (*comm_get_attr_)(Handle, int, void*, int*);
  int (*isend_)(const void*, int, Handle, int, int, Handle, Handle*);
  int (*improbe_)(int, int, Handle, int*, Handle*, MpiStatus*);
  int (*imrecv_)(void*, int, Handle, Handle*, Handle*);
  int (*test_)(Handle*, int*, MpiStatus*);
  int (*iprobe_)(int, int, Handle, int*, MpiStatus*);
  int (*get_count_)(const MpiStatus*, Handle, int*);
  int (*error_string_)(int, char*, int*);
};

// By its file, for some libraries of the standard ABI have another ABI's functions in other files.
bool has_standard_abi(void* library, const std::string& where) {
  Dl_info info{};
  return dladdr(find(library, "MPI_Init_thread", where), &info) != 0 && info.dli_fname != nullptr &&
         std::string_view(info.dli_fname).find("libmpi_abi.so") != std::string_view::npos;
}

std::unique_ptr<MpiLibrary> open(void* library, const std::string& where) {
  const std::string version = version_of(library, where), name = short_name(version);
  if (has_standard_abi(library, where)) {
    return std::make_unique<LibraryOf<void*>>(standard_mpi_abi(), library, where, name);
  }
  if (void* world = dlsym(library, "ompi_mpi_comm_world")) {
    const auto abi = open_mpi_abi(world, find(library, "ompi_mpi_byte", where),
                                  find(library, "ompi_mpi_errors_return", where));
    return std::make_unique<LibraryOf<void*>>(abi, library, where, name);
  }
  for (const char* family : {"MPICH", "Intel", "MVAPICH", "CRAY"}) {
    if (version.starts_with(family)) {
      return std::make_unique<LibraryOf<int>>(kMpichAbi, library, where, name);
    }
  }
  engine::fail<DeviceError>(
      "[mpi] expected Open MPI, MPICH, or a library of its ABI or of the standard one "
      "(libmpi_abi.so), got {} ({})",
      name, where);
}

std::vector<std::string> candidates(const MpiOptions& options) {
  if (!options.library_path.empty()) return {options.library_path};
  switch (options.family) {
    case MpiFamily::kOpenMpi:
      return {"libmpi.so.40", "libmpi_abi.so.1"};
    case MpiFamily::kMpich:
      return {"libmpi_abi.so.1", "libmpi.so.12", "libmpich.so.12"};
    case MpiFamily::kMpichFirst:
      return {"libmpi_abi.so.1", "libmpi.so.12", "libmpich.so.12", "libmpi.so.40"};
    case MpiFamily::kAny:
      break;
  }
  return {"libmpi.so.40", "libmpi_abi.so.1", "libmpi.so.12", "libmpich.so.12"};
}

}  // namespace

std::unique_ptr<MpiLibrary> MpiLibrary::load(const MpiOptions& options) {
  if (options.library_path.empty() && dlsym(RTLD_DEFAULT, "MPI_Init_thread") != nullptr) {
    return open(RTLD_DEFAULT, "this process");
  }
  std::string errors;
  for (const std::string& name : candidates(options)) {
    if (void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE)) {
      return open(library, name);
    }
    const char* error = dlerror();
    errors += (errors.empty() ? "" : "; ") + std::string(error != nullptr ? error : name);
  }
  engine::fail<DeviceError>("[mpi] expected an MPI library, got: {}", errors);
}

}  // namespace tessera::comm
