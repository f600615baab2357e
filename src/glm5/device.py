"""Devices by name: the only module that knows any. Everything else asks here, or follows the device of a tensor.

A name is ``auto`` (the accelerator of this machine, else its processor), ``cpu``, or any device type that PyTorch or
one of its plug-ins provides, with an optional index: ``cuda:1``, ``npu``, ``musa:0``. A plug-in is a package that
registers a device type when it is imported; ``PLUGINS`` names the known ones, and a device that a package not listed
here has already registered is found by its name alone. What differs between accelerators goes through
``torch.accelerator``.

PyTorch is imported inside the functions, so that configurations and command lines stay cheap.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import resource
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from glm5.errors import ConfigError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

HOST = "cpu"
"""The processor and its memory: where files are read to and where everything can run."""
HOST_BACKEND = "gloo"
BACKENDS = {HOST_BACKEND: HOST, "nccl": "cuda"}
"""Communication libraries of a process group of its own, each with the kind of memory that it sends from."""
AUTO = "auto"
"""The accelerator when there is one, else ``HOST``."""
PLUGINS: Mapping[str, str] = {
    "npu": "torch_npu", "musa": "torch_musa", "mlu": "torch_mlu", "gcu": "torch_gcu", "sdaa": "torch_sdaa",
    "hpu": "habana_frameworks.torch", "xla": "torch_xla",
}
"""Package that provides a device type which PyTorch itself does not bring."""


def find_device(name: str = AUTO) -> torch.device:
    """The device called ``name``, made current when it has an index.

    Raises ConfigError naming the package of a plug-in that is missing, or the devices that this machine has.
    """
    import torch

    if name == AUTO:
        _import_installed_plugins()
        return torch.accelerator.current_accelerator(check_available=True) or torch.device(HOST)
    kind, _, index = name.partition(":")
    if kind == HOST:
        return torch.device(HOST)
    if index and not index.isdecimal():
        raise ConfigError(f"device={name!r}: expected a device type and perhaps an index, for example {kind}:0")
    if kind in PLUGINS:
        _import_plugin(name, PLUGINS[kind])
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != kind:
        has = f"the accelerator here is {found.type}" if found else "this machine has no accelerator that PyTorch sees"
        raise ConfigError(f"device={name!r}: {has}; use device=\"auto\", or install the PyTorch build or plug-in "
                          "for it")
    if index and int(index) >= torch.accelerator.device_count():
        raise ConfigError(f"device={name!r}: this machine has {torch.accelerator.device_count()} of them, counted from "
                          "0; give a lower index")
    device = torch.device(kind, int(index)) if index else found
    if index:
        torch.accelerator.set_device_index(device)
    return device


def local_device(name: str, local_rank: int, local_processes: int) -> torch.device:
    """The device of one of several processes of a machine: accelerators are dealt out by local rank, processor cores
    evenly. Raises ConfigError when there are fewer accelerators than processes."""
    import torch

    device = find_device(name)
    if device.type == HOST:
        torch.set_num_threads(max(1, processor_count() // local_processes))
        return device
    return find_device(f"{device.type}:{local_rank}") if local_processes > 1 else device


def processor_count() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else os.cpu_count() or 1


def accelerator_names() -> list[str]:
    """Models of this machine's accelerators, where their driver lists them in files; needs no PyTorch."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def collective_backend(device: torch.device) -> str:
    """Name of the communication library for tensors of ``device``; those of the processor can always be sent too.

    Raises ConfigError for a device type without one.
    """
    import torch.distributed as dist

    host = dist.get_default_backend_for_device(HOST)
    if device.type == HOST:
        return host
    try:
        return f"{HOST}:{host},{device.type}:{dist.get_default_backend_for_device(device)}"
    except ValueError:
        raise ConfigError(f"device={device.type!r} has no communication library registered with PyTorch; train in one "
                          "process, or install the plug-in's") from None


def open_process_group(backend: str, store: dist.Store, rank: int, size: int, timeout: timedelta
                       ) -> tuple[dist.ProcessGroup, torch.device]:
    """A process group beside the default one, and the device of the tensors that it sends. ``backend``: one of
    ``BACKENDS``. Raises what PyTorch raises when the others do not come, or when it was built without the library."""
    import torch
    import torch.distributed as dist

    device = torch.device(BACKENDS[backend])
    if device.type == HOST:
        return dist.ProcessGroupGloo(store, rank, size, timeout), device
    return dist.ProcessGroupNCCL(store, rank, size, timeout), device


def has_integer_product(device: torch.device) -> bool:
    """Whether PyTorch multiplies int8 matrices on ``device`` faster than in floating point."""
    return device.type == "cuda"


def has_triton(device: torch.device) -> bool:
    """Whether the Triton kernels run on ``device``."""
    return device.type == "cuda"


def is_lost_peer(error: RuntimeError) -> bool:
    """Whether a communication library says by ``error`` that another process died or passed the deadline."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "HCCL", "Timed out"))


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on ``device`` is done, so that a clock read now is honest."""
    import torch

    if _is_accelerator(device):
        torch.accelerator.synchronize(device)


def peak_memory_bytes(device: torch.device | None = None) -> int:
    """Most memory that this program has held: allocated on an accelerator, or resident when ``device`` is none.

    Linux tells it since the program began; ``getrusage`` also counts the process that it was forked from.
    """
    if device is not None and _is_accelerator(device):
        import torch

        return int(torch.accelerator.max_memory_allocated(device))
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _is_accelerator(device: torch.device) -> bool:
    import torch

    found = torch.accelerator.current_accelerator()
    return found is not None and found.type == device.type


def _import_plugin(name: str, package: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f"device={name!r} needs the PyTorch plug-in {package}, which cannot be imported ({error}); "
                          f"install {package.partition('.')[0]} for this PyTorch version") from None


def _import_installed_plugins() -> None:
    """Plug-ins that are installed register themselves; one that fails to load is as good as absent for ``auto``."""
    for package in PLUGINS.values():
        if importlib.util.find_spec(package.partition(".")[0]) is not None:
            try:
                importlib.import_module(package)
            except ImportError as error:
                print(f"{package} is installed but cannot be imported ({error}); going on without it", file=sys.stderr)
