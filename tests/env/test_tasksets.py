"""The built-in tasksets: deterministic, disjoint, solvable, not to be cheated."""

import asyncio

import pytest

from glm5.env.check import check_taskset
from glm5.env.sandbox import SandboxPool
from glm5.env.tasks import BUILT_IN, SPLITS, ToolError, available_tasksets, draw, load_taskset, split_of, task_from_id
from glm5.errors import ConfigError, TaskError


@pytest.fixture(scope="module")
def attempt():
    """attempt(taskset, task, calls, answer) → reward parts: plays tool calls in a fresh sandbox and verifies."""
    loop = asyncio.new_event_loop()
    pool = SandboxPool(ready=1)
    loop.run_until_complete(pool.start())

    async def play(taskset, task, calls, final):
        box = await pool.acquire()
        try:
            await taskset.setup(task, box)
            outputs = []
            for name, arguments in calls:
                try:
                    outputs.append(await taskset.call(task, box, name, arguments))
                except ToolError as error:
                    outputs.append(str(error))
            messages = [{"role": "user", "content": task.instruction}, {"role": "assistant", "content": final}]
            return {**await taskset.verify(task, box, messages), "outputs": outputs}
        finally:
            await box.close()

    yield lambda taskset, task, calls, final="": loop.run_until_complete(play(taskset, task, calls, final))
    loop.run_until_complete(pool.close())
    loop.close()


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_the_expert_scores_one_and_doing_nothing_zero_on_every_split(name):
    rows = check_taskset(name, 14)
    assert [row["name"] for row in rows] == [
        "oracle.demo",
        "nothing.demo",
        "oracle.train",
        "nothing.train",
        "oracle.heldout",
        "nothing.heldout",
        "overlap",
    ]
    assert [row for row in rows if not row["met"]] == []


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_tasks_are_deterministic_and_splits_share_no_content(name):
    taskset, again = load_taskset(name), load_taskset(name)
    contents = {split: {taskset.content(taskset.task(split, index)) for index in range(300)} for split in SPLITS}
    assert taskset.task("train", 123) == again.task("train", 123)
    assert all(split_of(content) == split for split, found in contents.items() for content in found)
    assert len(set.union(*contents.values())) == sum(len(found) for found in contents.values())
    least = 150 if name == "gym" else 240  # few items in some sets; 720 names, and 4 of 10 shell tasks name one
    assert all(len(found) > least for found in contents.values())
    if name == "rooms":
        return  # the question names a person; which rooms there are is found out by calls
    instructions = {split: {taskset.task(split, index).instruction for index in range(300)} for split in SPLITS}
    assert not instructions["demo"] & instructions["heldout"] and not instructions["demo"] & instructions["train"]


def test_every_installed_name_loads_and_calls_itself_so():
    assert set(available_tasksets()) >= set(BUILT_IN)
    with pytest.raises(ConfigError, match=r"'sheel': not installed; installed: calculator, code, "):
        load_taskset("sheel")


def test_task_ids_name_a_task_or_an_error_in_one_line():
    tasksets = {"calculator": load_taskset("calculator")}
    assert task_from_id(tasksets, "calculator/train/7") == tasksets["calculator"].task("train", 7)
    for bad, message in (
        ("shell/train/0", "not served"),
        ("calculator/test/0", "expected one of"),
        ("calculator/train/x", "<index>"),
        ("calculator", "<index>"),
    ):
        with pytest.raises(TaskError, match=message):
            task_from_id(tasksets, bad)


def test_a_taskset_too_small_for_a_split_is_an_error_not_a_hang():
    assert split_of("only") in SPLITS
    other = next(split for split in SPLITS if split != split_of("only"))
    with pytest.raises(TaskError, match="enlarge the taskset"):
        draw("tiny", other, 0, lambda rng: "only", str)


def test_calculator_rewards_only_the_exact_value(attempt):
    taskset = load_taskset("calculator")
    for index in range(10):
        task = taskset.task("train", index)
        value = task.data["value"]
        assert attempt(taskset, task, taskset.solution(task).calls, str(value))["outputs"] == [str(value)]
        for wrong in (str(value + 1), f"{value}0", "", f"the answer is {value}", f"{value}.0"):
            assert attempt(taskset, task, [], wrong)["reward"] == 0.0
        assert attempt(taskset, task, [], f" {value}\n")["reward"] == 1.0


def test_shell_rewards_only_the_exact_tree(attempt):
    taskset = load_taskset("shell")
    for index in range(10):
        task = taskset.task("train", index)
        command, final = task.data["command"], task.data["answer"]
        for calls, text in (
            ([f"{command}; touch extra"], final),
            (["rm -rf ./*"], final),
            (["true"], final),
            ([f"{command}; chmod 000 ."], final),
            ([command, "ln -s x link"], final),
        ):
            parts = attempt(taskset, task, [("shell", {"command": call}) for call in calls], text)
            reads_only = task.data["before"] == task.data["after"] and calls == ["true"]
            assert parts["reward"] == float(reads_only and final != "done"), (task, calls, parts)
        if final != "done":
            assert attempt(taskset, task, [("shell", {"command": command})], "done")["reward"] == 0.0
            assert attempt(taskset, task, [("shell", {"command": command})], final)["reward"] == 1.0


def test_shell_shows_output_errors_and_silence(attempt):
    taskset = load_taskset("shell")
    task = taskset.task("train", 0)
    calls = [
        ("shell", {"command": "true"}),
        ("shell", {"command": "cat nofile"}),
        ("shell", {"command": "seq 1 999"}),
        ("shell", {}),
        ("shell", {"command": 3}),
        ("other", {"command": "true"}),
        ("shell", {"command": "sleep 9"}),
        ("shell", {"command": "true"}),
    ]
    ok, missing, long, absent, typed, other, slow, ended = attempt(taskset, task, calls)["outputs"]
    assert ok == "ok"
    assert missing == "error 1: cat: nofile: No such file or directory"
    assert len(long) == 300
    assert absent == "error: command is missing" and typed == "error: command is not a string"
    assert other == "error: no tool other"
    assert slow == "error: time is over" and "has ended" in ended


def test_repair_lets_the_agent_try_again(attempt):
    taskset = load_taskset("repair")
    for index in range(14):
        task = taskset.task("train", index)
        ((name, fix),) = taskset.solution(task).calls
        wrong = {**fix, "text": "return 123456"}
        parts = attempt(taskset, task, [(name, wrong), (name, fix)], "fixed")
        assert parts["outputs"][1] == "ok" and parts["outputs"][0].startswith(f"Here {task.data['function']}(")
        assert parts["reward"] == 1.0


def test_repair_cannot_be_cheated(attempt):
    taskset = load_taskset("repair")
    for index in (0, 2, 4, 10):
        task = taskset.task("train", index)
        expected, name = task.data["expected"][0], task.data["function"]
        for text in (
            f"return {expected!r}",
            "import os; os._exit(0)",
            "raise SystemExit(0)",
            "print('= 1'); return 1",
            f"print('= ' + repr({expected!r})); import os; os._exit(0)",
            "import sys; sys.exit(3)",
            "return type('A', (), {'__eq__': lambda *_: True, '__repr__': lambda _: 'A'})()",
            f"open('program.py', 'w').write('def {name}(*a): return {expected!r}')",
        ):
            parts = attempt(taskset, task, [("edit", {"line": task.data["line"], "text": text})], "fixed")
            assert parts["reward"] == 0.0, (task.instruction, text, parts)


def test_an_endless_loop_in_a_repair_is_a_wrong_answer(attempt):
    taskset = load_taskset("repair")
    parts = attempt(taskset, taskset.task("train", 0), [("edit", {"line": 2, "text": "while True: pass"})], "fixed")
    assert "gives TimeoutError, not" in parts["outputs"][0]
    assert parts["reward"] == 0.0


def test_repair_refuses_edits_outside_the_function(attempt):
    taskset = load_taskset("repair")
    task = taskset.task("train", 0)
    calls = [
        ("edit", {"line": 0, "text": "x"}),
        ("edit", {"line": 99, "text": "x"}),
        ("edit", {"line": 2, "text": "a\nb"}),
        ("edit", {"line": "two", "text": "x"}),
        ("edit", {"line": 2}),
        ("edit", {"line": 2, "text": "x" * 200}),
        ("test", {}),
    ]
    parts = attempt(taskset, task, calls)
    assert all(output.startswith("error: ") for output in parts["outputs"])
    assert parts["reward"] == 0.0 and parts["passed"] == 0.0


def test_repair_keeps_indentation_and_takes_a_line_number_as_text(attempt):
    taskset = load_taskset("repair")
    task = taskset.task("train", 2)
    ((name, fix),) = taskset.solution(task).calls
    assert attempt(taskset, task, [(name, {"line": str(fix["line"]), "text": f"      {fix['text']}  "})])[
        "outputs"
    ] == ["ok"]


def test_repair_failures_are_what_the_instruction_showed(attempt):
    taskset = load_taskset("repair")
    task = taskset.task("train", 4)
    same = {"line": 1, "text": task.data["source"].splitlines()[0]}
    output = attempt(taskset, task, [("edit", same)])["outputs"][0]
    assert output == task.instruction.splitlines()[-1]
    broken = attempt(taskset, task, [("edit", {"line": 2, "text": "return ("})])["outputs"][0]
    assert "gives SyntaxError, not" in broken
