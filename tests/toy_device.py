"""A device that is neither a processor nor a graphics card: PyTorch's PrivateUse1 slot, filled in Python.

A tensor of the device is an empty shell; its values lie in a host tensor beside it, found by the shell's storage. Every
operation without a kernel of its own runs on the host tensors. ``register`` is what a plug-in package does when it is
imported; it works once per process and everything it makes lives as long as the process.
"""

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_VALUES = {}
_LIBRARIES = []
CALLS = []
"""Names of the operations that ran on the device."""


def register(name):
    """Make ``name`` a device type of this process."""
    _setup_privateuseone_for_python_backend(name)
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _LIBRARIES.extend((everything, aten))
    everything.fallback(_run_on_host, "PrivateUse1")
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    aten.impl("_local_scalar_dense", lambda x: _values(x).item(), "PrivateUse1")
    aten.impl("view", lambda x, size: _view_shell(x, _values(x).reshape(size)), "PrivateUse1")
    aten.impl("as_strided", _as_strided, "PrivateUse1")
    torch.accelerator.synchronize = lambda device=None: None  # no streams; the slot cannot say so from Python
    torch.accelerator.max_memory_allocated = lambda device=None: sum(values.nbytes for values, _ in _VALUES.values())
    for overload in ("default", "start", "start_step"):  # their general form resizes an empty tensor
        operation = getattr(torch.ops.aten.arange, overload)
        suffix = "" if overload == "default" else f".{overload}"
        aten.impl(f"arange{suffix}", lambda *args, dtype=None, operation=operation, **_: _shell(
            operation(*args, dtype=dtype)), "PrivateUse1")


def _shell(values):
    shell = torch._C._acc.create_empty_tensor(tuple(values.shape), values.dtype)
    _VALUES[shell.untyped_storage()._cdata] = (values, shell)  # the shell too: its storage's address must stay taken
    return shell


def _view_shell(base, values):
    """A view of a tensor from outside inference mode is from outside, too."""
    with torch.inference_mode(base.is_inference()):
        return _shell(values)


def _values(shell):
    values = _VALUES[shell.untyped_storage()._cdata][0]
    is_reshaped = values.shape != shell.shape and values.numel() == shell.numel()
    return values.reshape(shell.shape) if is_reshaped else values


def _is_shell(x):
    return isinstance(x, torch.Tensor) and x.device.type == torch._C._get_privateuse1_backend_name()


def _run_on_host(operation, *args, **kwargs):
    CALLS.append(operation.name())
    leaves, structure = pytree.tree_flatten((args, kwargs))
    shells = {}

    def lower(x):
        if _is_shell(x):
            values = _values(x)
            shells[id(values)] = x
            return values
        return torch.device("cpu") if isinstance(x, torch.device) else x

    host_args, host_kwargs = pytree.tree_unflatten([lower(x) for x in leaves], structure)
    result = operation(*host_args, **host_kwargs)
    for shell in shells.values():
        values = _VALUES[shell.untyped_storage()._cdata][0]
        if values.numel() != shell.numel():  # an output that the operation resized
            shell.data = _shell(values)

    def lift(x):
        if not isinstance(x, torch.Tensor):
            return x
        return shells[id(x)] if id(x) in shells else _shell(x)

    return pytree.tree_map(lift, result)


def _copy_from(source, target, non_blocking=False):
    (_values(target) if _is_shell(target) else target).copy_(_values(source) if _is_shell(source) else source)
    return target


def _as_strided(x, size, stride, storage_offset=None):
    values = _values(x).contiguous()
    return _view_shell(x, values.as_strided(size, stride, values.storage_offset() + (storage_offset or 0)))
