"""Tasks and tasksets: what a taskset must provide, how tasks are drawn, how tasksets are found.

A task is a function of (taskset, split, index). The stable hash of its canonical content, wording excluded, decides the
split that the content belongs to; a draw of another split is rejected and repeated, so splits share no content by
construction. Third parties publish a taskset through the entry-point group ``glm5.tasksets``.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Literal, Protocol, TypeVar, get_args, runtime_checkable

from glm5.env.sandbox.base import Sandbox
from glm5.errors import ConfigError, TaskError

Split = Literal["demo", "train", "heldout"]
SPLITS: tuple[str, ...] = get_args(Split)
ENTRY_POINT_GROUP = "glm5.tasksets"
BUILT_IN = {
    "calculator": "glm5.env.tasksets.calculator:Calculator",
    "shell": "glm5.env.tasksets.shell:Shell",
    "repair": "glm5.env.tasksets.repair:Repair",
    "maths": "glm5.env.tasksets.maths:Maths",
    "science": "glm5.env.tasksets.science:Science",
    "code": "glm5.env.tasksets.code:Code",
    "python": "glm5.env.tasksets.python:Python",
    "gym": "glm5.env.tasksets.gym:Gym",
    "rooms": "glm5.env.tasksets.rooms:Rooms",
    "writing": "glm5.env.tasksets.writing:Writing",
}
"""What this distribution's entry points say, for a source tree that was not installed."""
Message = dict[str, Any]
Instance = TypeVar("Instance")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem instance."""

    task_id: str
    """``<taskset>/<split>/<index>``"""
    taskset: str
    split: str
    instruction: str
    """The user message."""
    data: dict[str, Any] = field(default_factory=dict)
    """What the taskset needs to set up and verify. Never leaves the task service."""


@dataclass(frozen=True, slots=True)
class Solution:
    """What a scripted expert does: tool calls in order, then a final answer."""

    calls: list[tuple[str, dict[str, Any]]]
    answer: str


class Taskset(Protocol):
    """A named collection of tasks with one verifier. Stateless: an episode's state is its sandbox."""

    name: str
    needs_sandbox: bool

    def tools(self) -> list[dict[str, Any]]:
        """OpenAI tool definitions."""
        ...

    def task(self, split: str, index: int) -> Task:
        """Task ``index`` of a split: the same for ever, for any index."""
        ...

    def content(self, task: Task) -> str:
        """Canonical content that decides the split: equal for two tasks that differ only in wording."""
        ...

    def solution(self, task: Task) -> Solution:
        """What the scripted expert does."""
        ...

    async def setup(self, task: Task, sandbox: Sandbox | None) -> None:
        """Prepare a clean sandbox. None where ``needs_sandbox`` is False."""
        ...

    async def call(self, task: Task, sandbox: Sandbox | None, tool: str, arguments: dict[str, Any]) -> str:
        """Run a tool; its result as the model sees it. Raises ToolError for arguments that cannot be used."""
        ...

    async def verify(self, task: Task, sandbox: Sandbox | None, messages: list[Message]) -> dict[str, float]:
        """Reward parts of the finished conversation; ``reward`` is the reward, the others are for people to read."""
        ...


@runtime_checkable
class Contrastive(Protocol):
    """A taskset that also knows worse answers: for preference pairs and demonstrations of self-verification."""

    def wrong_answer(self, task: Task) -> str:
        """An answer that looks right and is not."""
        ...

    def preference(self, task: Task) -> tuple[str, str]:
        """(better, worse) answer as a person would judge."""
        ...


class ToolError(TaskError):
    """A tool call that the model got wrong; the message is its result."""


def split_of(content: str) -> str:
    """The split that this content belongs to: demo 1/4, train 1/2, heldout 1/4 of all content."""
    return ("demo", "train", "heldout", "train")[hashlib.blake2b(content.encode(), digest_size=1).digest()[0] & 3]


def draw(name: str, split: str, index: int, make: Callable[[random.Random], Instance],
         content: Callable[[Instance], str]) -> Instance:
    """The instance of (name, split, index): draws by ``make`` until the content belongs to ``split``."""
    if split not in SPLITS:
        raise TaskError(f"split {split!r}: expected one of {', '.join(SPLITS)}")
    if index < 0:
        raise TaskError(f"task index {index}: expected 0 or more")
    for attempt in range(200):
        instance = make(random.Random(f"{name}/{split}/{index}/{attempt}"))
        if split_of(content(instance)) == split:
            return instance
    raise TaskError(f"{name}/{split}/{index}: 200 draws gave no content of this split; enlarge the taskset")


def task_from_id(tasksets: Mapping[str, Taskset], task_id: str) -> Task:
    """Inverse of ``Task.task_id``. Raises TaskError with one line for an unknown id."""
    name, _, rest = task_id.partition("/")
    split, _, index = rest.partition("/")
    if name not in tasksets:
        raise TaskError(f"task {task_id!r}: taskset {name!r} is not served here; served: {', '.join(tasksets)}")
    if not index.isdigit():
        raise TaskError(f"task {task_id!r}: expected <taskset>/<split>/<index>")
    return tasksets[name].task(split, int(index))


def available_tasksets() -> list[str]:
    """Names of every installed taskset."""
    return sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))})


def load_taskset(name: str) -> Taskset:
    """The installed taskset ``name``. Raises ConfigError when there is none, TaskError when it cannot be loaded."""
    found = [entry for entry in entry_points(group=ENTRY_POINT_GROUP) if entry.name == name]
    if not found and name not in BUILT_IN:
        raise ConfigError(f"taskset {name!r}: not installed; installed: {', '.join(available_tasksets())}")
    try:
        taskset = found[0].load()() if found else _load_object(BUILT_IN[name])()
    except (ImportError, AttributeError) as error:
        raise TaskError(f"taskset {name!r}: cannot be loaded: {error}") from None
    if taskset.name != name:
        raise TaskError(f"taskset {name!r}: its class calls itself {taskset.name!r}; make the two equal")
    return taskset


def _load_object(reference: str) -> Any:
    from importlib import import_module

    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)
