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
from glm5.env.sandbox import Sandbox, SandboxPool
from glm5.env.tasks import SPLITS, Message, Task, Taskset, load_taskset
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


def write_demonstrations(name: str, count: int, output: Path, sandbox: str = "bwrap") -> int:
    """Write the expert's conversations for the first ``count`` tasks of the demo split, one JSON object a line with
    ``messages`` and ``tools``; the number written. Raises as ``check_taskset``."""
    if count < 1:
        raise ConfigError(f"count {count}: expected at least 1 demonstration")
    lines = asyncio.run(_demonstrations(load_taskset(name), count, sandbox))
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output, "".join(json.dumps(line) + "\n" for line in lines))
    return len(lines)


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
