"""How Tessera's own C++ is compiled: tessera_library, tessera_test, tessera_binary.

Each takes what cc_library, cc_test and cc_binary take. tessera_library takes CUDA sources as well:

    tessera_library(
        name = "rmsnorm",
        srcs = ["rmsnorm.cc"],
        hdrs = ["rmsnorm.h"],
        cuda = ["rmsnorm.cu"],  # left out where there is no toolkit
        visibility = ["//:top"],
        deps = ["//engine:tape"],
    )
"""

load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_library", "cc_test")
load("//third_party/cuda:defs.bzl", "cuda_objects", "linked_toolkit", _if_cuda = "if_cuda", _if_nccl = "if_nccl")

if_cuda = _if_cuda
if_nccl = _if_nccl

_WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-Wno-stringop-overflow",  # gcc 12 is wrong about fmt's own headers
    "-Wno-unknown-warning-option",  # clang does not know the one above
]

# Tests, and kernels that the host's compiler compiles for them, take longer to compile than to run. With -Og tests compile in
# half to two thirds of the time of -O3. Kernels are run by many tests, so they are optimised a little more.
_TEST_COPTS = select({
    str(Label("//third_party:opt")): ["-Og"],
    "//conditions:default": [],
})
_HOST_KERNEL_COPTS = select({
    str(Label("//third_party:opt")): ["-O1"],
    "//conditions:default": [],
})

def _setting(name):
    return str(Label("//third_party:" + name))

def _copts():
    # Warnings stop the build in this repository only: whoever embeds the engine may have another compiler. Without
    # optimisation gcc warns of what is not there.
    strict = ["-Werror"] if native.repository_name() == "@" else []

    # No fused multiply-add that the source does not ask for: a sum must not depend on what the compiler inlined. Nobody
    # reads errno or floating point traps after a square root or a comparison; without them loops vectorise.
    return ["-std=c++20", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd"] + _WARNINGS + select({
        _setting("opt"): ["-O3"] + strict,
        "//conditions:default": [],
    }) + select({
        _setting("x86_64"): ["-march=x86-64-v2"],  # what is faster elsewhere is chosen at run time: engine/isa.h
        "//conditions:default": [],
    })

def tessera_library(name, srcs = [], hdrs = [], deps = [], copts = [], cuda = [], cuda_loaders = [], **kwargs):
    """A cc_library, with CUDA sources if it has any.

    Args:
      name: of the library.
      srcs: C++ sources and private headers (.cuh as well).
      hdrs: public headers.
      deps: libraries.
      copts: flags after the common ones.
      cuda: what needs a CUDA toolkit, left out where there is none: .cu sources, compiled as the toolkit says
        (//third_party/cuda:toolkit); .cc sources that call the runtime.
      cuda_loaders: libraries that load further libraries of the installed toolkit when they are called.
      **kwargs: as for cc_library.
    """
    textual = [src for src in srcs if src.endswith(".cuh")]
    sources = [src for src in srcs if not src.endswith(".cuh")]
    if cuda and if_cuda(True, False):
        kernels = [src for src in cuda if src.endswith(".cu")]
        sources = sources + [src for src in cuda if not src.endswith(".cu")]
        if kernels:
            cuda_objects(
                name = name + "_cuda_objects",
                srcs = kernels,
                hdrs = hdrs + textual + [src for src in srcs if src.endswith(".h")],
                copts = _copts() + copts + _HOST_KERNEL_COPTS,
                deps = deps,
                local_defines = kwargs.get("local_defines", []) + kwargs.get("defines", []),
                visibility = ["//visibility:private"],
            )
            sources = sources + [":%s_cuda_objects" % name]
    if cuda:
        # Only linked: what is C++ compiles in the same way whatever the toolkit, and builds with one reuse the objects of
        # those with another.
        linked_toolkit(
            name = name + "_linked_toolkit",
            loaders = cuda_loaders,
            tags = ["manual"],
            visibility = ["//visibility:private"],
        )
        deps = deps + ["@local_cuda//:headers", ":%s_linked_toolkit" % name]
    cc_library(
        name = name,
        srcs = sources,
        hdrs = hdrs,
        textual_hdrs = textual,
        copts = _copts() + (_TEST_COPTS if kwargs.get("testonly") else []) + copts,
        linkstatic = True,  # no shared library, so no second compilation of everything
        deps = deps,
        **kwargs
    )

# Packages that may have tests tagged `gpu`. Each ends with gpu_tests(), which //tools:gpu_bundle collects.
GPU_TEST_PACKAGES = ["tests/" + folder for folder in ["comm", "engine", "ops", "shard", "shard/checkpoint", "shard/hooks", "tools/train"]]

def gpu_tests():
    """The tests of this package that are tagged `gpu`, and not `no-bundle`, as :gpu_tests."""
    tests = []
    for name, rule in native.existing_rules().items():
        tags = rule.get("tags", [])
        if rule["kind"] == "cc_test" and "gpu" in tags and "no-bundle" not in tags:
            tests.append(name)
    native.filegroup(
        name = "gpu_tests",
        testonly = True,
        srcs = tests,
        data = tests,
        visibility = [str(Label("//:top"))],
    )

def tessera_test(name, srcs = None, deps = [], copts = [], size = "small", linkstatic = True, **kwargs):
    """A GoogleTest program with its main(). `srcs` is NAME.cc unless given.

    What is tagged `gpu` is built from its sources where there is a CUDA toolkit, and fails elsewhere.
    """
    tags = kwargs.get("tags", [])
    if "gpu" in tags and "no-bundle" not in tags:
        if native.package_name() not in GPU_TEST_PACKAGES:
            fail("expected a test tagged gpu in %s, got %s in %s" % (GPU_TEST_PACKAGES, name, native.package_name()))
        if native.existing_rule("gpu_tests"):
            fail("expected gpu_tests() after every test, got %s below it" % name)
    if "gpu" in tags and not if_cuda(True, False):
        srcs = [str(Label("//tests/testing:without_cuda_test.cc"))]
        deps = []
    cc_test(
        name = name,
        srcs = srcs or [name + ".cc"],
        copts = _copts() + _TEST_COPTS + copts,
        linkstatic = linkstatic,
        size = size,
        deps = deps + [
            "@googletest//:gtest",
            str(Label("//tests/testing:main")),
        ],
        **kwargs
    )

def tessera_binary(name, srcs = None, deps = [], copts = [], **kwargs):
    """A program. `srcs` is NAME.cc unless given."""
    cc_binary(
        name = name,
        srcs = srcs or [name + ".cc"],
        copts = _copts() + (_TEST_COPTS if kwargs.get("testonly") else []) + copts,
        deps = deps,
        **kwargs
    )
