"""Compiles the native kernels into one shared library with a C++17 compiler.

Every source is compiled once per instruction set of the target architecture and the objects are linked together; the
loader picks the best set that the running machine has, so a library built here runs on other machines. The library
carries a digest of its sources, by which the loader notices that it is out of date.

Imports the standard library only: ``setup.py`` runs it before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from glm5.errors import KernelError

SOURCES = ("attention.cpp", "elementwise.cpp", "experts.cpp", "indexer.cpp", "integer.cpp", "ragged.cpp",
           "sampling.cpp", "sparse.cpp")
"""Compiled once per instruction set; ``isa.cpp`` is compiled once."""

MATRIX_SOURCES = ("ragged.cpp",)
"""Those that use the matrix unit: of the set ``amx`` nothing else is compiled, the rest is ``avx512``."""

_AVX512 = ("16", "-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mavx2", "-mfma")
_X86_SETS = {
    "amx": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    "avx512": _AVX512,
    "avx2": ("8", "-mavx2", "-mfma"),
    "plain": ("4",),
}
_OTHER_SETS = {"plain": ("4",)}
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden")
_TIMEOUT_S = 600


def library_path() -> Path:
    """Where the compiled library lies beside this file; the suffix names interpreter and platform."""
    return Path(__file__).with_name("_native" + str(sysconfig.get_config_var("EXT_SUFFIX")))


def instruction_sets() -> tuple[str, ...]:
    """Names of the instruction sets that a library for this architecture contains, best first."""
    return tuple(_variants())


def source_digest() -> str:
    """Digest of every C++ file of this folder."""
    digest = hashlib.sha256()
    for path in sorted(p for p in Path(__file__).parent.iterdir() if p.suffix in (".cpp", ".h")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build_library(output: Path) -> None:
    """Compile and link the kernels into ``output`` (replaced atomically). Raises KernelError with one line."""
    compiler, folder = find_compiler(), Path(__file__).parent
    threads = () if sys.platform == "darwin" else ("-fopenmp",)  # Apple's clang has no OpenMP: one thread there
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".native-") as scratch:
        chooser, objects = str(Path(scratch, "isa.o")), []  # compiled first: a compiler that cannot work fails here
        _run([*compiler, *_FLAGS, *threads, f'-DGLM5_SOURCES="{source_digest()}"', "-c", str(folder / "isa.cpp"), "-o",
              chooser])
        commands = []
        for name, (lanes, *flags) in _variants().items():
            for source in MATRIX_SOURCES if name == "amx" else SOURCES:
                objects.append(str(Path(scratch, f"{name}-{source}.o")))
                commands.append([*compiler, *_FLAGS, *threads, *flags, f"-DGLM5_ISA={name}", f"-DGLM5_LANES={lanes}",
                                 "-c", str(folder / source), "-o", objects[-1]])
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(_run, commands))
        linked = Path(scratch, output.name)
        _run([*compiler, "-shared", *threads, chooser, *objects, "-o", str(linked)])
        os.replace(linked, output)


def find_compiler() -> list[str]:
    """Command of the C++ compiler: ``$CXX``, or the first of g++, c++ and clang++. Raises KernelError without one."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [["g++"], ["c++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    looked = chosen[0] if chosen else "g++, c++ or clang++"
    raise KernelError(f"native kernels: no C++ compiler ({looked} not found); install g++ (Debian: apt-get install "
                      "g++) or set CXX to a C++17 compiler, then install again")


def _variants() -> dict[str, tuple[str, ...]]:
    return _X86_SETS if platform.machine().lower() in ("x86_64", "amd64") else _OTHER_SETS


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise KernelError(f"native kernels: {command[0]} took more than {_TIMEOUT_S} s on one file; set CXX to another "
                          "compiler") from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.splitlines() or ["no output"]
        first = next((line for line in lines if "error" in line), lines[0]).strip()
        raise KernelError(f"native kernels: {command[0]} failed: {first}; set CXX to a C++17 compiler "
                          "(g++ 11 or clang++ 12, or newer)") from None
