"""Finds the CUDA toolkit, or its absence.

The toolkit is looked for in $CUDA_HOME, if set, else in /usr/local/cuda. Without one the libraries below exist all the
same and are empty. NO_CUDA=1 means: build without, whatever is there.

    @local_cuda//:headers  @local_cuda//:cudart (and where dlopen finds cublasLt)
    @local_cuda//:defs.bzl  CUDA_FOUND, NCCL_FOUND (its header; the library is loaded when asked for), NVCC, HOST_COMPILER
"""

_DEFS = """\
CUDA_FOUND = %s
NCCL_FOUND = %s
NVCC = "%s"
HOST_COMPILER = "%s"
"""

_PACKAGE = """\
load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])
"""

# What host code includes. The C++ core libraries are left out: 1,700 files, and only nvcc reads them.
_HEADERS = """
cc_library(
    name = "headers",
    hdrs = glob(
        ["include/*.h", "include/*.hpp"] + ["include/%s/**" % d for d in ["crt", "nccl_device", "nvtx3"]],
        allow_empty = True,
    ),
    includes = ["include"],
)
"""

_RUNTIME = """
cc_library(
    name = "cudart",
    linkopts = {linkopts},
    deps = [":headers"],
)
"""

_EMPTY = """
cc_library(name = "{name}")
"""

def _switched_off(ctx):
    return ctx.os.environ.get("NO_CUDA", "0") not in ["", "0"]

def _find_toolkit(ctx):
    """The toolkit's folder, or None. A CUDA_HOME that holds no toolkit is an error, never a quiet build without."""
    if _switched_off(ctx):
        return None
    home = ctx.os.environ.get("CUDA_HOME", "")
    if home:
        if not ctx.path(home + "/bin/nvcc").exists:
            fail("[@local_cuda] expected a CUDA toolkit in CUDA_HOME, got no %s/bin/nvcc. NO_CUDA=1 builds without" % home)
        return home
    home = "/usr/local/cuda"
    return home if ctx.path(home + "/bin/nvcc").exists else None

def _library_folder(ctx, home):
    for folder in ["lib64", "lib"]:
        if ctx.path("%s/%s/libcudart_static.a" % (home, folder)).exists:
            return "%s/%s" % (home, folder)
    fail("[@local_cuda] expected libcudart_static.a in the lib64 or lib of the CUDA toolkit, got none (%s)" % home)

def _cuda_configure_impl(ctx):
    home = _find_toolkit(ctx)
    if home == None:
        ctx.file("defs.bzl", _DEFS % (False, False, "", ""))
        ctx.file("BUILD", _PACKAGE + "".join([
            _EMPTY.format(name = name)
            for name in ["headers", "cudart"]
        ]))
        return

    folder = _library_folder(ctx, home)
    nccl = any([ctx.path(header).exists for header in [home + "/include/nccl.h", "/usr/include/nccl.h"]])
    ctx.file("defs.bzl", _DEFS % (True, nccl, home + "/bin/nvcc", ctx.which("g++")))
    ctx.symlink(home + "/include", "include")

    linkopts = ["-L" + folder, "-Wl,-rpath," + folder, "-lcudart_static", "-lpthread", "-ldl", "-lrt"]
    ctx.file("BUILD", _PACKAGE + _HEADERS + _RUNTIME.format(linkopts = linkopts))

cuda_configure = repository_rule(
    implementation = _cuda_configure_impl,
    environ = [
        "CUDA_HOME",
        "NO_CUDA",
    ],
    configure = True,
    local = True,
)
