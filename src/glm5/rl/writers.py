"""Metrics for TensorBoard and Weights & Biases, beside ``metrics.jsonl``. Both write below the run directory.

Each needs an extra of the package (``tensorboard``, ``wandb``); neither needs a network: W&B runs offline, and
``wandb sync RUN/wandb/offline-*`` uploads it later. A run that continues goes on in the same curves.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from glm5.errors import ConfigError


class Writer(Protocol):
    """Takes the numbers of one step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to every curve."""
        ...

    def close(self) -> None:
        """Bring everything to the disk."""
        ...


class TensorBoardWriter:
    """Event files in ``<run>/tensorboard``."""

    def __init__(self, run_dir: Path, name: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise _missing("tensorboard") from None
        self._writer: Any = SummaryWriter(str(run_dir / "tensorboard"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Names keep their dots as folders."""
        for key, value in values.items():
            self._writer.add_scalar(key.replace(".", "/"), value, step)

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()


class WandbWriter:
    """An offline run in ``<run>/wandb``; ``WANDB_MODE=online`` in the environment sends it at once."""

    def __init__(self, run_dir: Path, name: str) -> None:
        try:
            import wandb
        except ImportError:
            raise _missing("wandb") from None
        mode = os.environ.get("WANDB_MODE", "offline")
        self._run: Any = wandb.init(project="glm5", name=name, id=_identity(run_dir, name), dir=str(run_dir), mode=mode,
                                    resume="allow")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One record."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


WRITERS: dict[str, type[TensorBoardWriter] | type[WandbWriter]] = {
    "tensorboard": TensorBoardWriter, "wandb": WandbWriter}


class Writers:
    """All writers of a run."""

    def __init__(self, writers: Sequence[Writer]) -> None:
        self._writers = writers

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Give every writer the finite numbers among ``values``."""
        numbers = {key: float(value) for key, value in values.items()
                   if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)}
        for writer in self._writers:
            writer.write(step, numbers)


@contextmanager
def open_writers(names: Sequence[str], run_dir: Path, name: str) -> Iterator[Writers]:
    """The writers called ``names``. Raises ConfigError naming the extra that is not installed."""
    with ExitStack() as stack:
        writers: list[Writer] = []
        for one in names:
            writer = WRITERS[one](run_dir, name)
            stack.callback(writer.close)
            writers.append(writer)
        yield Writers(writers)


def _identity(run_dir: Path, name: str) -> str:
    """The same for every start of a run."""
    path = run_dir / "wandb-id"
    if not path.exists():
        path.write_text(f"{name}-{os.urandom(4).hex()}")
    return path.read_text()


def _missing(extra: str) -> ConfigError:
    return ConfigError(f"observation.writers: {extra} is not installed; pip install 'glm5[{extra}]' or leave it out")
