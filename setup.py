"""Builds the native CPU kernels as part of every install; everything else is declared in ``pyproject.toml``."""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent / "src"))
from glm5.errors import KernelError
from glm5.kernels.cpu.build import build_library


class NativeBuild(build_ext):
    """Leaves compiling to ``glm5.kernels.cpu.build``: one library with a form per instruction set, loaded by ctypes."""

    def build_extension(self, ext: Extension) -> None:
        try:
            build_library(Path(self.get_ext_fullpath(ext.name)))
        except KernelError as error:
            raise SystemExit(f"error: {error}") from None


setup(ext_modules=[Extension("glm5.kernels.cpu._native", sources=[])], cmdclass={"build_ext": NativeBuild})
