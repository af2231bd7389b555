"""Stands in for rules_cc, which Debian's Bazel 4 would fetch: there the C++ rules are still built in."""

cc_binary = native.cc_binary
cc_flags_supplier = None
cc_import = native.cc_import
cc_library = native.cc_library
cc_test = native.cc_test
cc_toolchain = native.cc_toolchain
cc_toolchain_suite = native.cc_toolchain_suite
compiler_flag = None
fdo_prefetch_hints = native.fdo_prefetch_hints
fdo_profile = native.fdo_profile
objc_import = native.objc_import
objc_library = native.objc_library
