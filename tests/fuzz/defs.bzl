"""fuzz_target: one way in for bytes that nobody vouches for. .ci/fuzz runs them."""

load("//tools:build_defs.bzl", "tessera_binary", "tessera_test")

def fuzz_target(name, deps):
    """NAME.cc, which defines what tests/fuzz/target.h declares, and its corpus.

    Args:
      name: of the source, of the folder below corpus, and of the program, which --config=fuzz alone can link.
      deps: of the source, besides :target.
    """
    tessera_binary(
        name = name,
        testonly = True,
        linkopts = ["-fsanitize=fuzzer"],
        tags = ["manual"],
        deps = deps + [
            ":libfuzzer",
            ":target",
        ],
    )
    tessera_test(
        name = name + "_corpus_test",
        srcs = [name + ".cc"],
        data = native.glob(["corpus/%s/*" % name]),
        deps = deps + [
            ":corpus_test",
            ":target",
        ],
    )
