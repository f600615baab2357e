"""Runs native tests once per instruction set that this machine has, on one and on several threads."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from glm5.kernels.cpu import inference, sparse, training
from glm5.kernels.cpu.library import native, runnable_sets


@pytest.fixture(params=runnable_sets())
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes the native operations use one instruction set."""
    for module in (inference, sparse, training):
        monkeypatch.setattr(module, "native", functools.partial(native, request.param))
    return str(request.param)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A seed and a thread count that no test inherits from another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
