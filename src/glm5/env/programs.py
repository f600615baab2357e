"""Untrusted functions: run in the sandbox on given inputs, judged outside on what they return.

Only inputs enter the sandbox. A function answers by the literal of its value, so there is no test to edit, no expected
value to find, and no object whose ``==`` could lie.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from glm5.env.sandbox.base import Sandbox

RUN_S = 2.0
"""Wall clock of all inputs together."""
_RUNNER = """
try:
    exec(compile(open({file!r}).read(), {file!r}, "exec"))
except BaseException as error:
    print(type(error).__name__)
    raise SystemExit(3)
for arguments in {inputs!r}:
    try:
        print("=", repr({name}(*arguments)))
    except BaseException as error:
        print("!", type(error).__name__)
"""


async def run_function(sandbox: Sandbox, file: str, name: str, inputs: Sequence[tuple[Any, ...]]) -> list[str]:
    """What function ``name`` of ``file`` returns for each input, as its literal; "!Error" where it raised or did not
    run."""
    result = await sandbox.python(_RUNNER.format(file=file, inputs=list(inputs), name=name), timeout_s=RUN_S)
    lines = result.output.splitlines()
    if result.exit_code == 3 and lines:
        return [f"!{lines[-1]}"] * len(inputs)
    answers = [line[2:] if line.startswith("= ") else f"!{line[2:]}" for line in lines if line[:2] in ("= ", "! ")]
    if result.exit_code != 0 or len(answers) != len(inputs):
        return ["!TimeoutError" if result.exit_code == 137 else "!Error"] * len(inputs)
    return answers


def agrees(output: str, expected: Any) -> bool:
    """True when ``output`` is a literal of the expected type and value."""
    try:
        value = ast.literal_eval(output)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    return repr(value) == repr(expected)


def trusted_function(source: str, name: str) -> Callable[..., Any]:
    """The function of a template of ours: trusted code, run in this process."""
    namespace: dict[str, Any] = {}
    exec(compile(source, "template", "exec"), namespace)
    return namespace[name]
