"""What tasksets of one question and one answer share: no tool, nothing to prepare, one turn."""

from __future__ import annotations

from typing import Any

from glm5.env.sandbox.base import Sandbox
from glm5.env.tasks import Solution, Task, ToolError


class Question:
    """Base of such tasksets; ``data`` of their tasks holds ``answer`` (the expert's) and ``content``."""

    name = ""
    needs_sandbox = False

    def tools(self) -> list[dict[str, Any]]:
        """None."""
        return []

    def content(self, task: Task) -> str:
        """What decides the split."""
        return str(task.data["content"])

    def solution(self, task: Task) -> Solution:
        """The answer at once."""
        return Solution([], task.data["answer"])

    async def setup(self, task: Task, sandbox: Sandbox | None) -> None:
        """Nothing to prepare."""

    async def call(self, task: Task, sandbox: Sandbox | None, tool: str, arguments: dict[str, Any]) -> str:
        """No tool may be called."""
        raise ToolError(f"error: no tool {tool}")
