"""The same repositories for MODULE.bazel (Bazel 7 and later)."""

load("//third_party:deps.bzl", "system_libraries")

def _system_impl(_ctx):
    system_libraries()

system = module_extension(implementation = _system_impl)
