"""The tasksets of reasoning: what counts as right, and what does not."""

import asyncio
import sys

import pytest

from glm5.env.sandbox import SandboxPool
from glm5.env.tasks import Task, ToolError, load_taskset
from glm5.env.tasksets import gym
from glm5.env.tasksets.code import Code
from glm5.env.tasksets.maths import Maths
from glm5.env.tasksets.python import Python
from glm5.env.tasksets.science import Science
from glm5.errors import ConfigError


def verdict(taskset, task, answer, box=None):
    messages = [{"role": "user", "content": task.instruction}, {"role": "assistant", "content": answer}]
    return asyncio.run(taskset.verify(task, box, messages))["reward"]


def by_kind(taskset, kind):
    return next(task for task in (taskset.task("train", index) for index in range(40)) if task.data["kind"] == kind)


def in_a_box(play):
    """``await play(box)`` in a fresh sandbox."""
    async def run():
        pool = SandboxPool(ready=1)
        try:
            await pool.start()
            box = await pool.acquire()
            try:
                return await play(box)
            finally:
                await box.close()
        finally:
            await pool.close()
    return asyncio.run(run())


@pytest.mark.parametrize(("kind", "numbers", "answer"), [
    ("larger", (34, 71), "71"), ("smaller", (34, 71), "34"), ("largest", (12, 99, 98), "99"),
    ("sort", (53, 12, 40), "12, 40, 53"), ("reverse", (120,), "021"), ("next", (999,), "1000"), ("tens", (407,), "0"),
    ("remainder", (407,), "7"), ("hundredfold", (37,), "3700"), ("add", (43, 5), "48")])
def test_maths_is_right(kind, numbers, answer):
    task = Task(task_id="maths/train/0", taskset="maths", split="train", instruction="",
                data={"kind": kind, "numbers": numbers, "answer": answer})
    assert verdict(Maths(), task, f" {answer}\n") == 1.0
    for wrong in ("", f"{answer}.", f"the answer is {answer}", f"{answer}{answer}", "0x47"):
        assert verdict(Maths(), task, wrong) == 0.0


def test_additions_of_maths_need_no_carry():
    tasks = [task for task in (Maths().task("train", index) for index in range(400)) if task.data["kind"] == "add"]
    assert tasks and all(sum(n % 10 for n in task.data["numbers"]) <= 9 for task in tasks)


def test_a_conversion_must_use_the_unit_that_was_asked_for():
    task = by_kind(Science(), "km_m")
    number = task.data["number"]
    assert task.data["answer"] == f"{number}000 m" and verdict(Science(), task, f"{number}000 m") == 1.0
    for wrong in (f"{number} km", f"{number}000", f"{number}000 g", f"{number}00 m", "", f"{number}000 m."):
        assert verdict(Science(), task, wrong) == 0.0


def test_physics_may_be_answered_in_any_unit_of_the_dimension():
    task = by_kind(Science(), "force")
    number = task.data["number"]
    for right in (f"{number}0 N", f"{number}0.0 N", f"{number / 100:.2f} kN"):
        assert verdict(Science(), task, right) == 1.0
    for wrong in (f"{number}0 J", f"{number}0", f"-{number}0 N"):
        assert verdict(Science(), task, wrong) == 0.0
    speed = by_kind(Science(), "speed")
    assert verdict(Science(), speed, f"{speed.data['number'] / 10:.1f} m/s") == 1.0


def test_code_is_judged_by_what_it_returns():
    taskset = Code()
    task = next(task for task in (taskset.task("train", index) for index in range(12)) if "at most" in task.instruction)
    name, limit = task.data["function"], task.data["content"].removeprefix("min(x, ").removesuffix(")")
    right = (f"def {name}(x): return min(x, {limit})", f"{name} = lambda x: x if x < {limit} else {limit}",
             f"Like this:\n```python\ndef {name}(x):\n    if x > {limit}:\n        return {limit}\n    return x\n```")
    wrong = ("", "def", f"def {name}(x): return x", f"def {name}(x): return {limit}",
             f"def other(x): return min(x, {limit})", f"def {name}(x): return float(min(x, {limit}))",
             f"def {name}(x): return str(min(x, {limit}))", f"def {name}(x):\n    while True: pass",
             "import os; os._exit(0)", "raise SystemExit(0)", "print('= 1')\n" * 8 + "import os; os._exit(0)",
             f"def {name}(x): return min(x, {limit})\n" + "#" * 5000)

    async def play(box):
        async def reward(answer):
            messages = [{"role": "assistant", "content": answer}]
            return (await taskset.verify(task, box, messages))["reward"]
        return [await reward(answer) for answer in right], [await reward(answer) for answer in wrong]

    accepted, refused = in_a_box(play)
    assert accepted == [1.0] * len(right) and refused == [0.0] * len(wrong)


def test_no_constant_and_no_copy_of_an_argument_passes_code():
    for index in range(60):
        data = Code().task("train", index).data
        assert len(data["inputs"]) == len(data["expected"]) == 8
        assert len({repr(value) for value in data["expected"]}) > 1
        assert any(value not in arguments for arguments, value in zip(data["inputs"], data["expected"], strict=True))


def test_python_shows_output_and_errors_and_judges_the_answer():
    taskset = Python()
    task = by_kind(taskset, "distance")
    a, b = task.data["a"], task.data["b"]

    async def play(box):
        async def call(code):
            return await taskset.call(task, box, "python", {"code": code})
        outputs = [await call(code) for code in (f"print({a} * {b})", "x = 1", "1 / 0", "print('y' * 999)")]
        for tool, arguments in (("shell", {"code": "1"}), ("python", {}), ("python", {"code": 3})):
            with pytest.raises(ToolError):
                await taskset.call(task, box, tool, arguments)
        return outputs

    value, silent, error, long = in_a_box(play)
    assert (value, silent, error) == (str(a * b), "ok", "error: ZeroDivisionError: division by zero")
    assert long == "y" * 200
    assert verdict(taskset, task, f"{a * b} m") == 1.0 and verdict(taskset, task, f"{a * b / 1000} km") == 1.0
    assert verdict(taskset, task, str(a * b)) == verdict(taskset, task, f"{a * b + 1} m") == 0.0
    plain = by_kind(taskset, "multiply")
    product = plain.data["a"] * plain.data["b"]
    assert verdict(taskset, plain, str(product)) == 1.0 and verdict(taskset, plain, f"{product} m") == 0.0


@pytest.mark.parametrize("name", sorted(gym.SETS))
def test_sets_of_reasoning_gym_pass_the_audit(name):
    assert gym.audit_set(name, 6) == []


@pytest.mark.parametrize("name", ["game_of_life_halting", "rubiks_cube"])
def test_the_audit_finds_what_is_wrong_with_others(name):
    assert gym.audit_set(name, 6) != []


def test_an_item_of_gym_is_what_its_seed_gives():
    taskset = load_taskset("gym")
    task = taskset.task("heldout", 1)
    assert task.data["set"] == "gcd" and "Greatest Common Divisor" in task.instruction
    assert verdict(taskset, task, task.data["answer"]) == 1.0
    assert verdict(taskset, task, "") == verdict(taskset, task, f"{task.data['answer']} maybe") == 0.0


def test_without_the_library_gym_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    gym._library.cache_clear()
    with pytest.raises(ConfigError, match=r"glm5\[gym\]"):
        load_taskset("gym").task("demo", 0)
    gym._library.cache_clear()
