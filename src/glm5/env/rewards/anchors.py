"""Human-written answers: what a group, a judge or a preference pair compares the model's answers with."""

from __future__ import annotations

import json
from pathlib import Path

from glm5.env.tasks import Task, Taskset
from glm5.errors import ConfigError


class Anchors:
    """Anchors of one taskset."""

    def __init__(self, source: str, taskset: Taskset) -> None:
        """``source``: "" for none, ``solution`` for the taskset's own answers, else a ``.jsonl`` file with
        ``instruction`` and ``answer``. Raises ConfigError naming file and line."""
        self._taskset, self._own = taskset, source == "solution"
        self._answers = _read(Path(source)) if source and not self._own else {}

    def answer(self, task: Task) -> str | None:
        """The anchor of a task, None when it has none or is solved with tools rather than by an answer."""
        if not self._own:
            return self._answers.get(task.instruction)
        solution = self._taskset.solution(task)
        return None if solution.calls else solution.answer


def _read(path: Path) -> dict[str, str]:
    answers: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"anchors={str(path)!r}: cannot be read ({error}); give a .jsonl file, or solution") from None
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            instruction, answer = record["instruction"], record["answer"]
        except (ValueError, KeyError, TypeError):
            instruction = answer = None
        if not isinstance(instruction, str) or not isinstance(answer, str) or not answer.strip():
            raise ConfigError(f"{path}:{number}: expected an object with the texts 'instruction' and 'answer'")
        answers[instruction] = answer
    return answers
