"""What can be proved of a taskset before anything learns from it, and the demonstrations that it gives.

For every split: the scripted expert scores 1, doing nothing scores 0, and no content belongs to two splits.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from glm5.env.episodes import first_messages, run_solution
from glm5.env.rewards.config import VerificationConfig
from glm5.env.rewards.verification import demonstrate
from glm5.env.sandbox import Sandbox, SandboxPool
from glm5.env.tasks import SPLITS, Contrastive, Message, Task, Taskset, load_taskset
from glm5.errors import ConfigError
from glm5.runlog import tracked, write_atomic


def check_taskset(name: str, count: int = 16, sandbox: str = "bwrap") -> list[dict[str, Any]]:
    """Result rows for the first ``count`` tasks of each split: ``oracle.SPLIT`` and ``nothing.SPLIT`` (mean rewards)
    and ``overlap`` (contents in more than one split); ``met`` says whether the value is the goal.

    Raises ConfigError for an unknown name, SandboxError when isolation is missing.
    """
    if count < 1:
        raise ConfigError(f"count {count}: expected at least 1 task per split")
    return asyncio.run(_check(load_taskset(name), count, sandbox))


def write_demonstrations(name: str, count: int, output: Path, sandbox: str = "bwrap",
                         verification: VerificationConfig | None = None) -> int:
    """Write the expert's conversations for the first ``count`` tasks of the demo split, one JSON object a line with
    ``messages`` and ``tools``; the number written. With ``verification`` each goes on with a verdict, every second time
    on a wrong answer. Raises as ``check_taskset``."""
    if count < 1:
        raise ConfigError(f"count {count}: expected at least 1 demonstration")
    taskset = load_taskset(name)
    lines = asyncio.run(_demonstrations(taskset, count, sandbox))
    if verification is not None:
        lines = [{**line, "messages": demonstrate(verification, line["messages"], _wrong_answer(taskset, index))}
                 for index, line in enumerate(lines)]
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output, "".join(json.dumps(line) + "\n" for line in lines))
    return len(lines)


def write_pairs(name: str, count: int, output: Path, split: str = "demo") -> int:
    """Write preference pairs for the first ``count`` tasks of a split, one JSON object a line with ``messages``,
    ``chosen`` and ``rejected``; the number written. Raises ConfigError for a taskset that knows no worse answers."""
    taskset = load_taskset(name)
    if not isinstance(taskset, Contrastive):
        raise ConfigError(f"taskset {name!r}: has no preference(task); give one that tells better from worse answers")
    if count < 1:
        raise ConfigError(f"count {count}: expected at least 1 pair")
    tasks = [taskset.task(split, index) for index in range(count)]
    lines = [{"messages": first_messages(task), "chosen": chosen, "rejected": rejected}
             for task in tasks for chosen, rejected in [taskset.preference(task)]]
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output, "".join(json.dumps(line) + "\n" for line in lines))
    return len(lines)


def _wrong_answer(taskset: Taskset, index: int) -> str | None:
    """What replaces the answer of demonstration ``index``; None leaves it."""
    if index % 2 == 0 or not isinstance(taskset, Contrastive):
        return None
    return taskset.wrong_answer(taskset.task("demo", index))


async def _demonstrations(taskset: Taskset, count: int, sandbox: str) -> list[dict[str, Any]]:
    async with _pool_for(taskset, sandbox) as pool:
        conversations = [await _play(taskset, taskset.task("demo", index), pool, expert=True)
                         for index in tracked(range(count), f"demonstrations of {taskset.name}", "conversations")]
    return [{"messages": messages, "tools": taskset.tools()} for messages, _ in conversations]


async def _check(taskset: Taskset, count: int, sandbox: str) -> list[dict[str, Any]]:
    rows = []
    contents: dict[str, set[str]] = {}
    async with _pool_for(taskset, sandbox) as pool:
        for split in SPLITS:
            tasks = [taskset.task(split, index) for index in range(count)]
            contents[split] = {taskset.content(task) for task in tasks}
            for row, expert, goal in (("oracle", True, 1.0), ("nothing", False, 0.0)):
                rewards = [(await _play(taskset, task, pool, expert))[1] for task in tasks]
                rows.append(_row(f"{row}.{split}", sum(rewards) / count, "reward", goal, count))
    shared = sum(len(contents[a] & contents[b]) for a in SPLITS for b in SPLITS if a < b)
    return [*rows, _row("overlap", float(shared), "contents", 0.0, count * len(SPLITS))]


def _row(name: str, value: float, unit: str, goal: float, n: int) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "n": n, "goal": goal, "met": value == goal}


async def _play(taskset: Taskset, task: Task, pool: SandboxPool | None, expert: bool) -> tuple[list[Message], float]:
    """(conversation, reward) of the expert, or of an agent that answers nothing."""
    box: Sandbox | None = await pool.acquire() if pool is not None else None
    try:
        await taskset.setup(task, box)
        messages = (await run_solution(taskset, task, box) if expert
                    else [*first_messages(task), {"role": "assistant", "content": ""}])
        return messages, (await taskset.verify(task, box, messages))["reward"]
    finally:
        if box is not None:
            await box.close()


@asynccontextmanager
async def _pool_for(taskset: Taskset, sandbox: str) -> AsyncIterator[SandboxPool | None]:
    if not taskset.needs_sandbox:
        yield None
        return
    pool = SandboxPool(sandbox)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()
