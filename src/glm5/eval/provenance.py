"""What a result was measured on: hardware, commit, memory. Linux gives all of it; elsewhere parts are unknown."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import glm5
from glm5.device import accelerator_names, processor_count


def hardware() -> str:
    """One line: processor, cores that this process may use, memory, accelerators, system, Python, torch."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    try:
        torch = f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch = "no torch"
    parts = [_processor(), f"{processor_count()} cores", f"{memory:.1f} GB", *accelerator_names(),
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



def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
