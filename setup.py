"""pip install .: the package `tessera`, from python/.

The engine is built by Bazel first and installed to a folder of its own below build/. With TESSERA_PREFIX it is taken from an
installation that is there: that of `./bazelw run //tools:install -- PREFIX`, with the same sources.
"""

import os
import re
import shlex
import shutil
import subprocess

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

_ROOT = os.path.dirname(os.path.abspath(__file__))


def version():
    with open(os.path.join(_ROOT, "MODULE.bazel"), encoding="utf-8") as file:
        return re.search(r'^    version = "(.*)",', file.read(), flags=re.MULTILINE).group(1)


def flags_of(prefix, what):
    paths = [os.path.join(prefix, "lib", "pkgconfig"), os.environ.get("PKG_CONFIG_PATH", "")]
    environment = dict(os.environ, PKG_CONFIG_PATH=os.pathsep.join(filter(None, paths)))
    done = subprocess.run(["pkg-config", what, "tessera"], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return shlex.split(done.stdout)


class Build(build_ext):
    def finalize_options(self):
        super().finalize_options()
        self.force = True  # what it is linked with may have changed

    def build_extensions(self):
        prefix = os.environ.get("TESSERA_PREFIX")
        if not prefix:
            prefix = os.path.abspath(os.path.join(self.build_temp, "tessera"))
            environment = dict(os.environ, BAZELW_PACKAGES="pkg-config")
            subprocess.run([os.path.join(_ROOT, "bazelw"), "run", "//tools:install", "--", prefix], cwd=_ROOT, env=environment, check=True)
        for extension in self.extensions:
            extension.extra_compile_args += flags_of(prefix, "--cflags")
            extension.extra_link_args += flags_of(prefix, "--libs") + ["-Wl,-rpath,$ORIGIN", "-Wl,--exclude-libs,ALL"]
        super().build_extensions()
        plugin = os.path.join(prefix, "lib", "libtessera_gloo.so")  # which the loader looks for beside the extension
        if os.path.exists(plugin):
            shutil.copy(plugin, os.path.dirname(self.get_ext_fullpath("tessera._engine")))


setup(
    version=version(),
    packages=["tessera"],
    package_dir={"": "python"},
    ext_modules=[
        Pybind11Extension(
            "tessera._engine",
            ["python/src/model.cc", "python/src/module.cc", "python/src/run.cc"],
            include_dirs=["python/src"],
            cxx_std=20,
        )
    ],
    cmdclass={"build_ext": Build},
)
