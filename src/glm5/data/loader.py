"""Batches made ahead of training in worker processes, in the order of the rows whatever the number of workers is.

The trainer's process sends each worker the row numbers of a batch and takes the answers in the order in which it sent
them, at most ``ahead`` batches per worker being under way. A worker also tokenises shards that are not ready yet,
before their rows are needed. Without workers a batch is made when it is asked for.

A worker that dies is noticed at once, through its closed connection. Workers end when the loader is closed or when its
process dies, however that happens.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np

from glm5.data.packing import Batch, Row, RowSource, collate
from glm5.data.shards import Shard
from glm5.errors import Glm5Error, ServiceError

_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Worker:
    process: BaseProcess
    connection: Connection


class Loader:
    """Batches of one row source. Use as a context manager."""

    def __init__(self, source: RowSource, length: int, seed: int, workers: int = 0, ahead: int = 2,
                 shards: Sequence[Shard] = ()) -> None:
        """``shards`` are tokenised by the workers in this order, each once."""
        self._source, self._length, self._seed, self._ahead = source, length, seed, ahead
        context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        for index in range(workers):
            ours, theirs = context.Pipe()
            arguments = (theirs, source, length, seed, list(shards[index::workers]))
            process = context.Process(target=_work, args=arguments, name=f"glm5-data-{index}", daemon=True)
            process.start()
            theirs.close()  # so that the death of the worker closes the connection
            self._workers.append(_Worker(process, ours))

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers and wait until they are gone."""
        for worker in self._workers:
            worker.connection.close()
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join(_CLOSE_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.process.close()
        self._workers.clear()

    def batches(self, ranges: Iterator[range]) -> Iterator[Batch]:
        """The batch of each range of row numbers, in order, until ``ranges`` ends.

        Raises what a worker raised, and ServiceError when a worker is gone.
        """
        if not self._workers:
            for numbers in ranges:
                yield collate([self._source.row(number, self._length, self._seed) for number in numbers])
            return
        under_way: deque[_Worker] = deque()
        for worker, numbers in zip(cycle(self._workers), ranges, strict=False):
            self._send(worker, numbers)
            under_way.append(worker)
            if len(under_way) == self._ahead * len(self._workers):
                yield self._receive(under_way.popleft())
        while under_way:
            yield self._receive(under_way.popleft())

    def _send(self, worker: _Worker, numbers: range) -> None:
        try:
            worker.connection.send(numbers)
        except OSError:
            raise self._gone(worker) from None

    def _receive(self, worker: _Worker) -> Batch:
        try:
            answer = worker.connection.recv()
        except (EOFError, OSError):
            raise self._gone(worker) from None
        if isinstance(answer, BaseException):
            raise answer
        return collate([Row(*(array.astype(kind) for array, kind in zip(row, _KINDS, strict=True))) for row in answer])

    def _gone(self, worker: _Worker) -> ServiceError:
        worker.process.join(_CLOSE_S)
        return ServiceError(f"{worker.process.name}: the data worker is gone (exit code {worker.process.exitcode}, "
                            "negative for a signal; -9 is often a lack of memory); start the run again, it continues "
                            "from its newest checkpoint, or set data.workers = 0")


_KINDS = (np.int64, np.int64, np.int64, np.bool_)
_SENT_KINDS = (np.int32, np.int32, np.int32, np.bool_)


def _work(connection: Connection, source: RowSource, length: int, seed: int, shards: list[Shard]) -> None:
    """A worker: answer each range of row numbers with its rows; tokenise ``shards`` beside that."""
    _prepare_worker()
    if shards:
        threading.Thread(target=_build, args=(shards,), daemon=True).start()
    try:
        while True:
            numbers = connection.recv()
            connection.send(_answer(source, numbers, length, seed))
    except (EOFError, OSError):  # the loader is closed or its process is gone
        os._exit(0)


def _answer(source: RowSource, numbers: range, length: int, seed: int) -> object:
    """The arrays of each row, or the error to raise in the trainer."""
    try:
        rows = [source.row(number, length, seed) for number in numbers]
        return [tuple(array.astype(kind) for array, kind in
                      zip((row.ids, row.positions, row.documents, row.loss_mask), _SENT_KINDS, strict=True))
                for row in rows]
    except Glm5Error as error:
        return error
    except Exception:
        return RuntimeError(f"in a data worker:\n{traceback.format_exc()}")


def build_shards(shards: Sequence[Shard], workers: int = 0) -> None:
    """Tokenise ``shards`` in ``workers`` processes; here without any. Raises what a worker raised, and ServiceError
    when one is gone."""
    if not workers:
        for shard in shards:
            shard.build()
        return
    # No process is forked: threads of the tokenizer library may be running.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _prepare_worker) as pool:
        try:
            deque(pool.map(_build_one, shards), maxlen=0)
        except BrokenProcessPool:
            raise ServiceError("a data worker died while it tokenised, often for lack of memory; run again with fewer "
                               "data.workers, what is done is kept") from None


def _prepare_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent closes us
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers are the parallelism


def _build_one(shard: Shard) -> None:
    shard.build()


def _build(shards: list[Shard]) -> None:
    """Tokenise ahead; an error shows when the rows of the shard are asked for."""
    for shard in shards:
        try:
            shard.build()
        except Glm5Error:
            return
