"""What a result was measured on: hardware, commit, memory. Linux gives all of it; elsewhere parts are unknown."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import glm5


def hardware() -> str:
    """One line: processor, cores that this process may use, memory, accelerators, system, Python, torch."""
    cores = len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    try:
        torch = f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch = "no torch"
    parts = [_processor(), f"{cores} cores", f"{memory:.1f} GB", *_accelerators(),
             f"{platform.system()} {platform.release()}", f"Python {platform.python_version()}", torch]
    return ", ".join(parts)


def commit() -> str:
    """Commit of the source tree that runs, ``+changes`` added when tracked files differ; the version if there is none.
    """
    directory = Path(glm5.__file__).parent
    head = _git(directory, "rev-parse", "HEAD")
    if head is None:
        return f"glm5 {glm5.__version__}"
    return f"{head}+changes" if _git(directory, "status", "--porcelain", "--untracked-files=no") else head


def peak_rss_bytes() -> int:
    """Largest resident memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _accelerators() -> list[str]:
    """Models of NVIDIA devices, as the driver lists them."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
