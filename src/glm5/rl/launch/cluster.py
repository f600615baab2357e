"""A run on a Ray cluster: the trainer as a task, every service as a process below an actor, placed by resources.

Ray decides where things run and notices nodes that are lost; everything else is as on one machine: the same
supervisor, the same HTTP between the services, the run directory as the place of ledger, weights and checkpoints. So
the run directory must lie on a file system that all nodes share, under the same path, and the package must be installed
on all of them.

A process that dies or hangs is started again on its node, at its URL. With a node its URLs are lost, and the run ends
with one line; started again, it goes on from its newest checkpoint on the nodes that are left.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from glm5.errors import ConfigError, Glm5Error, ServiceError
from glm5.process import reserve, spawn, stop
from glm5.rl.config import RLConfig

_PLACE_TIMEOUT_S = 60.0
_CALL_TIMEOUT_S = 30.0
_POLL_TIMEOUT_S = 5.0
"""A node that does not say whether a process runs: the probes of the supervisor find out."""


def train_on_cluster(config: RLConfig, run_dir: Path) -> Path:
    """``run_rl`` on the node that has the trainer's resources; gives the final checkpoint.

    Raises ConfigError without Ray, ServiceError when no node fits or one is lost, and what ``run_rl`` raises.
    """
    is_ours = not import_ray().is_initialized()
    ray = _connect(config)
    try:
        options = _options(config, "trainer")
        _require_room(ray, "trainer", options)
        running = ray.remote(max_retries=0, **options)(_train).remote(config, run_dir.resolve(), os.getcwd())
        failure, path = ray.get(running)
    except ray.exceptions.RayTaskError:  # a defect of ours: its traceback says more
        raise
    except ray.exceptions.RayError as error:
        raise ServiceError(f"{run_dir}: the trainer's node was lost ({str(error).splitlines()[0]}); run again, it goes "
                           "on from its newest checkpoint") from None
    finally:
        if is_ours:
            ray.shutdown()
    if failure is not None:
        raise failure
    return Path(path)


def _train(config: RLConfig, run_dir: Path, directory: str) -> tuple[Glm5Error | None, str]:
    """The task: (what a user can fix, None) or (None, the checkpoint); Ray would wrap the error."""
    from glm5.rl.trainer import run_rl

    os.chdir(directory)
    try:
        return None, str(run_rl(config, run_dir))
    except Glm5Error as error:
        return error, ""


class RayMachines:
    """Places services on the nodes of the cluster. ``on_event(kind, **values)`` gets where."""

    def __init__(self, config: RLConfig, on_event: Callable[..., None]) -> None:
        """Raises ConfigError without Ray, ServiceError without a cluster."""
        self._config, self._on_event = config, on_event
        self._ray = _connect(config)

    def place(self, service: str) -> RayMachine:
        """An actor for ``service`` where its resources are. Raises ServiceError when no node has them."""
        ray = self._ray
        kind = service.partition("-")[0]
        options = _options(self._config, kind)
        _require_room(ray, service, options)
        strategy = "SPREAD" if kind == "tasks" else "DEFAULT"
        actor = ray.remote(scheduling_strategy=strategy, **options)(_Host).remote()
        machine = RayMachine(ray, actor, service)
        host, port = machine.address
        self._on_event("service_placed", service=service, node=machine.node, host=host, port=port)
        return machine


class RayMachine:
    """A node of the cluster, as one service sees it: the actor on it starts and watches the process."""

    is_here = False

    def __init__(self, ray: Any, actor: Any, service: str) -> None:
        self._ray, self._actor, self._service = ray, actor, service
        self.address, self.node = self._call(actor.place, timeout_s=_PLACE_TIMEOUT_S)

    def start(self, arguments: Sequence[str], log_file: Path) -> RayProcess:
        """See ``Machine``."""
        pid = self._call(self._actor.start, list(arguments), log_file.resolve())
        return RayProcess(pid, self._poll)

    def stop(self, process: RayProcess, grace_s: float = 5) -> None:
        """See ``Machine``; with a lost node its processes are gone."""
        try:
            self._call(self._actor.stop, grace_s)
        except ServiceError:
            return

    def release(self) -> None:
        """See ``Machine``."""
        self._ray.kill(self._actor)

    def _poll(self) -> int | None:
        try:
            code: int | None = self._ray.get(self._actor.poll.remote(), timeout=_POLL_TIMEOUT_S)
            return code
        except self._ray.exceptions.GetTimeoutError:
            return None
        except self._ray.exceptions.RayActorError:
            raise self._lost() from None

    def _call(self, method: Any, *arguments: Any, timeout_s: float = _CALL_TIMEOUT_S) -> Any:
        try:
            return self._ray.get(method.remote(*arguments), timeout=timeout_s)
        except self._ray.exceptions.GetTimeoutError:
            raise ServiceError(f"{self._service}: its node did not answer within {timeout_s:.0f} s; look at 'ray "
                               "status', then run again") from None
        except self._ray.exceptions.RayActorError:
            raise self._lost() from None

    def _lost(self) -> ServiceError:
        return ServiceError(f"{self._service}: its node was lost; run again, it goes on from the newest checkpoint")


class RayProcess:
    """A process below an actor."""

    def __init__(self, pid: int, poll: Callable[[], int | None]) -> None:
        self.pid, self._poll = pid, poll

    def poll(self) -> int | None:
        """See ``Process``."""
        return self._poll()


class _Host:
    """The actor: keeps a port of its node and owns the process there."""

    def __init__(self) -> None:
        self._holder = reserve(import_ray().util.get_node_ip_address())
        self._process: Any = None

    def place(self) -> tuple[tuple[str, int], str]:
        """Host and port, and the id of the node."""
        host, port = self._holder.getsockname()[:2]
        return (str(host), int(port)), str(import_ray().get_runtime_context().get_node_id())

    def start(self, arguments: list[str], log_file: Path) -> int:
        self._process = spawn(arguments, log_file)
        return int(self._process.pid)

    def poll(self) -> int | None:
        code: int | None = self._process.poll()
        return code

    def stop(self, grace_s: float) -> None:
        stop(self._process, grace_s)


def import_ray() -> Any:
    """The library. Raises ConfigError naming the extra when it is missing."""
    try:
        import ray
    except ImportError:
        raise ConfigError("launch='ray' needs Ray; pip install 'glm5[cluster]', or take launch='local'") from None
    return ray


def _connect(config: RLConfig) -> Any:
    """The library, connected to the cluster; inside a task of it, it is already."""
    ray = import_ray()
    if not ray.is_initialized():
        try:
            ray.init(address=config.cluster.address, log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ServiceError(f"cluster.address={config.cluster.address!r}: no Ray cluster there "
                               f"({str(error).splitlines()[0]}); start one with 'ray start --head'") from None
    return ray


def _options(config: RLConfig, kind: str) -> dict[str, Any]:
    """Ray's options for the trainer or one kind of service: processors and the configured resources."""
    cluster = config.cluster
    wanted: Mapping[str, float] = {"trainer": cluster.trainer, "engine": cluster.engine, "reward": cluster.engine,
                                   "tasks": cluster.tasks}.get(kind, {})
    processors = {"trainer": config.trainer_threads, "engine": config.engine_threads,
                  "reward": config.engine_threads}.get(kind, 0)
    resources = {name: amount for name, amount in wanted.items() if name != "GPU"}
    return {"num_cpus": processors, "num_gpus": wanted.get("GPU", 0), "resources": resources}


def _require_room(ray: Any, name: str, options: Mapping[str, Any]) -> None:
    """Raise ServiceError unless some node has what ``options`` ask for, used or not: else Ray would wait for ever."""
    wanted = dict(options["resources"], CPU=options["num_cpus"], GPU=options["num_gpus"])  # as Ray names them
    for node in ray.nodes():
        if node["Alive"] and all(node["Resources"].get(key, 0) >= amount for key, amount in wanted.items()):
            return
    needed = ", ".join(f"{key}={amount:g}" for key, amount in sorted(wanted.items()) if amount)
    raise ServiceError(f"{name}: no node of the cluster has {needed}; correct [cluster] or add a node")
