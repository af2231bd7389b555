#include "tests/emulator/symbols.h"

#include <cxxabi.h>
#include <elf.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string_view>

#include "tests/emulator/edges.h"

extern "C" void* __tls_get_addr(std::size_t (*)[2]);

namespace tessera::cuda_emulation {
namespace {

constexpr std::string_view kKernelTag = "B11cuda_kernel";
constexpr std::string_view kSharedTag = "B11cuda_shared";

struct Module {
  std::uintptr_t base = 0;
  std::size_t tls_module = 0;
  std::string path;
};

struct Symbols {
  struct Shared {
    std::string name;
    ThreadLocal variable;
  };
  std::map<std::uintptr_t, std::string> kernels;  // mangled names by address
  std::vector<Shared> shared;
};

Module module_of(const void* address) {
  struct Search {
    std::uintptr_t address;
    Module found;
  } search{reinterpret_cast<std::uintptr_t>(address), {}};
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* data) {
        auto& search = *static_cast<Search*>(data);
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const ElfW(Phdr)& header = info->dlpi_phdr[i];
          if (header.p_type == PT_LOAD &&
              search.address - (info->dlpi_addr + header.p_vaddr) < header.p_memsz) {
            const bool is_main = info->dlpi_name == nullptr || *info->dlpi_name == '\0';
            search.found = {info->dlpi_addr, info->dlpi_tls_modid,
                            is_main ? "/proc/self/exe" : info->dlpi_name};
            return 1;
          }
        }
        return 0;
      },
      &search);
  return search.found;
}

Symbols read_symbols(const Module& module) {
  const int file = open(module.path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat status {};
  if (file < 0 || fstat(file, &status) != 0) {
    throw std::runtime_error(fmt::format("cannot read the symbols of {}", module.path));
  }
  const auto nbytes = static_cast<std::size_t>(status.st_size);
  void* const mapped = mmap(nullptr, nbytes, PROT_READ, MAP_PRIVATE, file, 0);
  close(file);
  if (mapped == MAP_FAILED) throw std::runtime_error(fmt::format("cannot map {}", module.path));
  const std::unique_ptr<void, std::function<void(void*)>> unmap(
      mapped, [nbytes](void* memory) { munmap(memory, nbytes); });

  const auto* bytes = static_cast<const char*>(mapped);
  const auto* elf = reinterpret_cast<const ElfW(Ehdr)*>(bytes);
  const auto* sections = reinterpret_cast<const ElfW(Shdr)*>(bytes + elf->e_shoff);
  Symbols symbols;
  for (int i = 0; i < elf->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    const char* const names = bytes + sections[sections[i].sh_link].sh_offset;
    const auto* symbol = reinterpret_cast<const ElfW(Sym)*>(bytes + sections[i].sh_offset);
    const auto* const end = symbol + sections[i].sh_size / sizeof *symbol;
    for (; symbol != end; ++symbol) {
      if (symbol->st_shndx == SHN_UNDEF) continue;
      const std::string_view name = names + symbol->st_name;
      const int type = ELF64_ST_TYPE(symbol->st_info);
      if (type == STT_FUNC && name.find(kKernelTag) != name.npos) {
        symbols.kernels[module.base + symbol->st_value] = name;
      } else if (type == STT_TLS && name.find(kSharedTag) != name.npos) {
        symbols.shared.push_back(
            {std::string(name), {module.tls_module, symbol->st_value, symbol->st_size}});
      }
    }
  }
  return symbols;
}

std::string demangled(const std::string& mangled) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status), std::free);
  std::string name = status == 0 ? text.get() : mangled;
  constexpr std::string_view kTag = "[abi:cuda_kernel]";
  const std::size_t tag = name.find(kTag);
  if (tag != name.npos) {
    // "void a::kernel[abi:cuda_kernel]<float>(float*)" without return type and parameters
    const std::string anonymous = "(anonymous namespace)::";
    std::size_t end = tag + kTag.size();
    int depth = 0;
    while (end < name.size() && (depth > 0 || name[end] != '(')) {
      depth += name[end] == '<' ? 1 : name[end] == '>' ? -1 : 0;
      ++end;
    }
    name = name.substr(0, tag) + name.substr(tag + kTag.size(), end - tag - kTag.size());
    for (std::size_t at; (at = name.find(anonymous)) != name.npos;) {
      name.erase(at, anonymous.size());
    }
    if (name.starts_with("void ")) name.erase(0, 5);
  }
  return name;
}

KernelSymbols find(const void* kernel, const Module& module, const Symbols& symbols) {
  const auto function = symbols.kernels.find(reinterpret_cast<std::uintptr_t>(kernel));
  if (function == symbols.kernels.end()) {
    throw std::runtime_error(fmt::format(
        "{} has no symbol of the __global__ function at {}: is it stripped?", module.path, kernel));
  }
  const std::string& mangled = function->second;
  KernelSymbols found{.name = demangled(mangled), .shared = {}, .shared_of_functions = {}};
  const std::string own = "_ZZ" + mangled.substr(2) + "E";
  for (const Symbols::Shared& shared : symbols.shared) {
    if (shared.name.starts_with(own)) {
      found.shared.push_back(shared.variable);
    } else if (shared.name.find(kKernelTag) == shared.name.npos) {
      found.shared_of_functions.push_back(shared.variable);
    }
  }
  return found;
}

}  // namespace

void* ThreadLocal::address() const {
  std::size_t index[2] = {module, offset};
  return __tls_get_addr(&index);
}

const KernelSymbols& kernel_symbols(const void* kernel) {
  static std::mutex mutex;
  // Never destroyed: streams may still run when the program ends.
  static auto& modules = *new std::map<std::uintptr_t, Symbols>;  // by base
  static auto& kernels = *new std::map<const void*, KernelSymbols>;
  const Unseen unseen;
  const std::lock_guard lock(mutex);
  const auto known = kernels.find(kernel);
  if (known != kernels.end()) return known->second;
  const Module module = module_of(kernel);
  auto symbols = modules.find(module.base);
  if (symbols == modules.end()) {
    symbols = modules.emplace(module.base, read_symbols(module)).first;
  }
  return kernels.emplace(kernel, find(kernel, module, symbols->second)).first->second;
}

}  // namespace tessera::cuda_emulation
