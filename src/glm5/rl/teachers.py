"""Cross-stage distillation: engines that hold the teachers and score what the student sampled.

Every taskset has one teacher, a checkpoint of an earlier stage. After a batch is leased, each of its samples is sent to
the engine of its teacher as a prompt with nothing to generate; the log-probs that come back, at the temperature of the
episodes, are kept on the sample (GLM-5 report, section 12). The engines are processes beside the run's own services,
supervised like them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from glm5.errors import ServiceError
from glm5.records import Sample
from glm5.rl.config import RLConfig
from glm5.rl.ledger import LeasedBatch
from glm5.rl.supervisor import ServiceSpec

REQUESTS = 16
"""Samples that are sent at once."""
TIMEOUT_S = 120.0
"""How long a batch may take to be scored, restarts of engines included."""
RETRY_S = 0.5


def teacher_services(config: RLConfig, checkpoints: Mapping[str, Path]) -> list[ServiceSpec]:
    """Engines of the teachers, for the supervisor of the run; none without teachers."""
    return [ServiceSpec(f"teacher-{name}", "/health_generate", lambda name=name, checkpoint=checkpoint: [
        "serve", str(checkpoint), "--max-slots", str(REQUESTS), "--device", config.engine_device,
        "--max-context", str(config.max_context), "--threads", str(config.teachers[name].threads)])
        for name, checkpoint in checkpoints.items()]


class Teachers:
    """Client of the teachers' engines; use as a context manager.

    ``urls``: by name of the service. ``tend`` is called while scores are awaited.
    """

    def __init__(self, config: RLConfig, urls: Mapping[str, str], tend: Callable[[], None]) -> None:
        self._config, self._tend = config, tend
        self._http = httpx.Client(timeout=30, trust_env=False)
        self._requests = ThreadPoolExecutor(REQUESTS, thread_name_prefix="teacher")
        self._urls = {taskset: urls[f"teacher-{name}"]
                      for name, teacher in config.teachers.items() for taskset in teacher.tasksets}

    def __enter__(self) -> Teachers:
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.shutdown(cancel_futures=True)
        self._http.close()

    def score(self, batch: LeasedBatch) -> LeasedBatch:
        """``batch`` with the teachers' log-probs on its samples.

        Raises ServiceError when an engine refuses, or does not answer within ``TIMEOUT_S``.
        """
        deadline = time.monotonic() + TIMEOUT_S
        pending = [self._requests.submit(self._score, sample, deadline) for sample in batch.samples]
        while not all(request.done() for request in pending):
            self._tend()
            time.sleep(0.002)
        samples = [dataclasses.replace(sample, teacher_logprobs=request.result())
                   for sample, request in zip(batch.samples, pending, strict=True)]
        return dataclasses.replace(batch, samples=samples)

    def _score(self, sample: Sample, deadline: float) -> list[float]:
        url = self._urls[sample.taskset]
        request = {"input_ids": sample.trajectory.ids, "return_prompt_logprob": True, "stream": False,
                   "sampling_params": {"temperature": self._config.temperature, "max_new_tokens": 0}}
        while True:
            try:
                return _read_logprobs(self._http.post(f"{url}/generate", json=request), sample, url)
            except httpx.HTTPError as error:  # the engine is down: it is being restarted at the same address
                if time.monotonic() > deadline:
                    raise ServiceError(f"teacher of {sample.taskset} at {url}: no answer within {TIMEOUT_S:.0f} s "
                                       f"({error!r}); see the logs of the run directory") from error
            time.sleep(RETRY_S)


def _read_logprobs(answer: httpx.Response, sample: Sample, url: str) -> list[float]:
    body: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
    found = body.get("prompt_logprobs", [])
    if len(found) != len(sample.trajectory.ids):
        raise ServiceError(f"teacher of {sample.taskset} at {url}: scored {len(found)} of "
                           f"{len(sample.trajectory.ids)} ids: {answer.text[:200]}")
    return [0.0, *found[1:]]  # nothing predicts the first id
