"""Workers: the same batches in the same order, errors and deaths that are told, clean ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from glm5.data.config import CorpusConfig
from glm5.data.loader import Loader, build_shards
from glm5.data.mixture import Mixture
from glm5.data.packing import Row, batches, make_row, row_ranges
from glm5.data.prepare import prepare
from glm5.data.selection import Preparation
from glm5.errors import DataError, ServiceError
from glm5.tokenizer import Tokenizer

LENGTH = 16


class Counting:
    """Row n holds n; one row can fail, kill its process, or be slow."""

    def __init__(self, bad: int = -1, kind: str = "") -> None:
        self.bad, self.kind = bad, kind

    def row(self, number: int, length: int, seed: int) -> Row:
        if number == self.bad and self.kind == "error":
            raise DataError("row is bad")
        if number == self.bad and self.kind == "defect":
            raise KeyError("missing")
        if number == self.bad and self.kind == "death":
            os.kill(os.getpid(), signal.SIGKILL)
        if number % 5 == 2:
            time.sleep(0.002)
        return make_row(np.array([number, seed, number % 7]), np.array([0, 0, 1]), length, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_order_does_not_depend_on_the_number_of_workers(workers: int) -> None:
    with Loader(Counting(), LENGTH, 9, workers) as loader:
        ours = list(islice(loader.batches(row_ranges(4, 2)), 12))
    assert not multiprocessing.active_children()
    for batch, plain in zip(ours, batches(Counting(), 4, LENGTH, 9, 2), strict=False):
        for name in ("ids_BT", "positions_BT", "documents_BT", "loss_mask_BT"):
            assert getattr(batch, name).equal(getattr(plain, name))
            assert getattr(batch, name).dtype == getattr(plain, name).dtype


def test_a_finite_list_of_batches_ends_and_ranks_see_their_part() -> None:
    with Loader(Counting(), LENGTH, 0, 2, ahead=3) as loader:
        ranges: Iterator[range] = islice(row_ranges(4, 0, 1, 2), 5)
        assert [batch.ids_BT[:, 0].tolist() for batch in loader.batches(ranges)] == [
            [2, 3], [6, 7], [10, 11], [14, 15], [18, 19]]


def test_errors_of_a_row_reach_the_trainer_when_its_batch_is_due() -> None:
    with Loader(Counting(9, "error"), LENGTH, 0, 2) as loader:
        stream = loader.batches(row_ranges(4))
        assert [next(stream).ids_BT[0, 0].item() for _ in range(2)] == [0, 4]
        with pytest.raises(DataError, match="row is bad"):
            next(stream)
    with Loader(Counting(0, "defect"), LENGTH, 0, 1) as loader:
        with pytest.raises(RuntimeError, match="KeyError: 'missing'"):
            next(loader.batches(row_ranges(4)))


def test_a_dead_worker_is_told_with_its_exit_code() -> None:
    with Loader(Counting(9, "death"), LENGTH, 0, 2) as loader:
        stream = loader.batches(row_ranges(4))
        next(stream)
        with pytest.raises(ServiceError, match=r"glm5-data-\d: the data worker is gone \(exit code -9") as caught:
            for _ in range(8):
                next(stream)
        assert "\n" not in str(caught.value)
    assert not multiprocessing.active_children()


def test_workers_end_when_their_process_is_killed() -> None:
    code = ("import sys; sys.path[:0] = [%r, %r]\n"
            "from tests.data.test_loader import Counting, Loader, row_ranges\n"
            "if __name__ == '__main__':\n"
            "    loader = Loader(Counting(), 16, 0, 2)\n"
            "    next(loader.batches(row_ranges(4)))\n"
            "    print(*(worker.process.pid for worker in loader._workers), flush=True)\n"
            "    sys.stdin.read()\n")
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", code % (str(root), str(root / "src"))], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        process.kill()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and any(_runs(pid) for pid in pids):
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_workers_tokenise_shards_ahead_and_give_the_same_rows(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"def f{number}(x):\n    return x + {number}\n" * 4)
    preparation = Preparation(corpora=(CorpusConfig(sources=(str(tmp_path),)),), length=LENGTH, shard_chars=1200)
    here = prepare(preparation, tokenizer, tmp_path.with_name("here"))
    build_shards(here.pending("train"))
    ahead = prepare(preparation, tokenizer, tmp_path.with_name("ahead"))
    pending = ahead.pending("train")
    assert len(pending) > 3
    with Loader(Mixture(ahead.datasets("train")), LENGTH, 0, 2, shards=pending) as loader:
        stream = loader.batches(row_ranges(2))
        for plain in islice(batches(Mixture(here.datasets("train")), 2, LENGTH, 0), 80):
            assert next(stream).ids_BT.equal(plain.ids_BT)
        deadline = time.monotonic() + 60
        while ahead.pending("train") and time.monotonic() < deadline:
            time.sleep(0.05)
    assert not ahead.pending("train")


def test_shards_can_be_tokenised_by_a_pool(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text(f"file {number}\n" * 20)
    preparation = Preparation(corpora=(CorpusConfig(sources=(str(tmp_path),)),), length=LENGTH, shard_chars=400)
    prepared = prepare(preparation, tokenizer, tmp_path.with_name("pool"))
    build_shards(prepared.pending("train"), workers=2)
    assert not prepared.pending("train")


class Deadly:
    """A shard whose building kills the process."""

    def build(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_while_it_tokenises_is_told() -> None:
    with pytest.raises(ServiceError, match="a data worker died while it tokenised"):
        build_shards([Deadly(), Deadly()], workers=1)  # type: ignore[list-item]
