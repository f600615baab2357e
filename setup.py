"""Builds the native CPU kernels as part of every install; everything else is declared in ``pyproject.toml``."""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent / "src"))
from glm5.errors import KernelError
from glm5.kernels.cpu.build import build_library, find_compiler

BUILDING = {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"}


class NativeBuild(build_ext):
    """Leaves compiling to ``glm5.kernels.cpu.build``: one library with a form per instruction set, loaded by ctypes."""

    def build_extension(self, ext: Extension) -> None:
        build_library(Path(self.get_ext_fullpath(ext.name)))


try:
    if BUILDING & set(sys.argv):
        find_compiler()  # before anything else, so that a missing compiler is the only output
    setup(ext_modules=[Extension("glm5.kernels.cpu._native", sources=[])], cmdclass={"build_ext": NativeBuild})
except KernelError as error:
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(2) from None
