from collections import Counter

import pytest

from glm5.errors import ConfigError
from glm5.rl.config import CurriculumConfig
from glm5.rl.curriculum import Curriculum, RatioPicker, Visit

from .factories import add_group, open_ledger


def fresh(index):
    return Visit(index, f"t/{index}", 0)


def ask(curriculum, times, step=10):
    return [curriculum.next_visit("t", step) for _ in range(times)]


def test_a_task_that_was_solved_sometimes_is_visited_again_by_a_later_policy():
    curriculum = Curriculum(CurriculumConfig(revisit_share=0.99, revisit_after_steps=2))
    curriculum.record("t", fresh(4), [1.0, 0.0, 0.0], step=3)
    assert ask(curriculum, 3, step=4) == [None] * 3
    assert curriculum.next_visit("t", 5) == Visit(4, "t/4", 1)
    assert ask(curriculum, 3) == [None] * 3


@pytest.mark.parametrize("rewards", [[], [0.0, 0.0], [1.0, 1.0], [0.3, 0.3]])
def test_a_task_without_signal_is_not_visited_again(rewards):
    curriculum = Curriculum(CurriculumConfig(revisit_share=0.99))
    curriculum.record("t", fresh(0), rewards, step=0)
    assert ask(curriculum, 4) == [None] * 4


def test_visits_to_one_task_are_limited():
    curriculum = Curriculum(CurriculumConfig(revisit_share=0.99, max_visits=3, revisit_after_steps=0))
    curriculum.record("t", fresh(0), [0.0, 1.0], step=0)
    numbers = []
    for _ in range(12):
        visit = curriculum.next_visit("t", 0)
        if visit is not None:
            numbers.append(visit.number)
            curriculum.record("t", visit, [0.0, 1.0], step=0)
    assert numbers == [1, 2]


def test_visits_stay_below_their_share_of_the_groups():
    curriculum = Curriculum(CurriculumConfig(revisit_share=0.25))
    for index in range(100):
        curriculum.record("t", fresh(index), [0.0, 1.0], step=0)
    visits = ask(curriculum, 40)
    assert sum(visit is not None for visit in visits) == 10
    assert [visit.task_index for visit in visits if visit] == list(range(10))


def test_unused_share_is_not_saved_up_for_a_burst():
    curriculum = Curriculum(CurriculumConfig(revisit_share=0.5))
    ask(curriculum, 20)
    for index in range(10):
        curriculum.record("t", fresh(index), [0.0, 1.0], step=0)
    assert [visit is not None for visit in ask(curriculum, 6)] == [True, False, True, False, True, False]


def test_a_restart_knows_the_last_visit_of_every_task(tmp_path):
    ledger = open_ledger(tmp_path)
    ledger.record_version(0, 0)
    ledger.set_progress(0, 0)
    add_group(ledger, 0)
    add_group(ledger, 1, rewards=(1.0, 1.0))
    ledger.open_group("calculator-0v1", taskset="calculator", task_id="task-calculator-0", task_index=0, visit=1,
                      size=2)
    assert [row[:4] for row in ledger.last_visits()] == [("calculator", 1, "task-calculator-1", 0)]
    ledger.drop_open_groups("interrupted")
    add_group(ledger, 2, rewards=(0.0, 1.0))
    assert ledger.last_visits()[-1] == ("calculator", 2, "task-calculator-2", 0, [0.0, 1.0])
    assert ledger.next_task_index("calculator") == 3
    ledger.close()


@pytest.mark.parametrize("wrong", [{"max_visits": 0}, {"revisit_share": 1.0}, {"balance": 0.5},
                                   {"revisit_after_steps": -1}])
def test_values_out_of_range_are_named(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CurriculumConfig(**wrong)


def pick(picker, served, full=()):
    return picker.pick(dict.fromkeys(served, 1.0), lambda name: name not in full)


def test_ratios_hold_in_every_window_of_one_round():
    picker = RatioPicker({"calculator": 2.0, "shell": 1.0, "repair": 1.0})
    names = [pick(picker, ["calculator", "shell", "repair"]) for _ in range(40)]
    for start in range(0, 40, 4):
        assert Counter(names[start:start + 4]) == {"calculator": 2, "shell": 1, "repair": 1}


def test_an_absent_taskset_earns_no_credit_for_a_burst():
    picker = RatioPicker({"calculator": 1.0, "shell": 1.0})
    assert [pick(picker, ["calculator"]) for _ in range(10)] == ["calculator"] * 10
    after = [pick(picker, ["calculator", "shell"]) for _ in range(4)]
    assert Counter(after) == {"calculator": 2, "shell": 2}


def test_others_fill_in_for_a_full_taskset_which_then_catches_up_within_bounds():
    picker = RatioPicker({"calculator": 1.0, "shell": 1.0})
    assert [pick(picker, ["calculator", "shell"], full={"shell"}) for _ in range(100)] == ["calculator"] * 100
    after = [pick(picker, ["calculator", "shell"]) for _ in range(40)]
    assert Counter(after[:10])["shell"] >= 8  # not a hundred
    assert Counter(after[20:]) == {"calculator": 10, "shell": 10}
    assert pick(picker, ["calculator", "shell"], full={"calculator", "shell"}) is None


def test_a_service_may_wish_more_of_its_taskset():
    picker = RatioPicker({"calculator": 1.0, "shell": 1.0})
    names = Counter(picker.pick({"calculator": 3.0, "shell": 1.0}, lambda name: True) for _ in range(40))
    assert names == {"calculator": 30, "shell": 10}


def test_no_available_taskset_gives_none():
    assert pick(RatioPicker({"calculator": 1.0}), ["other"]) is None


def test_a_taskset_with_fewer_trainable_groups_starts_more_of_them_within_bounds():
    picker = RatioPicker({"calculator": 1.0, "shell": 1.0}, balance=2.0)
    for n in range(400):
        picker.record("calculator", n % 2 == 0)
        picker.record("shell", n % 20 == 0)
    weights = picker.weights()
    assert weights["shell"] == 2.0 and weights["calculator"] == 0.5
    names = Counter(pick(picker, ["calculator", "shell"]) for _ in range(50))
    assert names == {"shell": 40, "calculator": 10}


def test_equal_rates_leave_the_shares_as_configured():
    picker = RatioPicker({"calculator": 3.0, "shell": 1.0}, balance=2.0)
    for n in range(100):
        picker.record("calculator", n % 2 == 0)
        picker.record("shell", n % 2 == 0)
    assert picker.weights() == pytest.approx({"calculator": 3.0, "shell": 1.0})
