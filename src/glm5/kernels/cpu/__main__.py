"""``python -m glm5.kernels.cpu``: compile the native kernels in place, for developers who edit the C++ sources."""

from __future__ import annotations

import sys

from glm5.errors import KernelError
from glm5.kernels.cpu.build import build_library, library_path


def main() -> int:
    try:
        build_library(library_path())
    except KernelError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"built {library_path()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
