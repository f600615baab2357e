"""A third-party taskset that a random model already solves half of the time: answer with an even number of characters.

Tests install it as a user would, through the entry-point group, by a ``dist-info`` directory on ``PYTHONPATH``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glm5.env.service import Solution, Task


class Coin:
    """Reward 1 for an answer of even length."""

    name = "coin"
    needs_sandbox = False

    def tools(self) -> list[dict[str, Any]]:
        return []

    def task(self, split: str, index: int) -> Task:
        return Task(task_id=f"coin/{split}/{index}", taskset="coin", split=split, instruction=f"Say something {index}.")

    def content(self, task: Task) -> str:
        return task.task_id

    def solution(self, task: Task) -> Solution:
        return Solution([], "even")

    async def setup(self, task: Task, sandbox: Any) -> None:
        pass

    async def call(self, task: Task, sandbox: Any, tool: str, arguments: dict[str, Any]) -> str:
        return ""

    async def verify(self, task: Task, sandbox: Any, messages: list[dict[str, Any]]) -> dict[str, float]:
        return {"reward": float(len(str(messages[-1].get("content") or "")) % 2 == 0)}


def install(directory: Path) -> None:
    """Make ``coin`` an installed taskset for every process with ``directory`` on its path."""
    (directory / "coin_taskset.py").write_text(Path(__file__).read_text())
    info = directory / "coin_taskset-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: coin-taskset\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[glm5.tasksets]\ncoin = coin_taskset:Coin\n")
