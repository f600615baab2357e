"""pass@1 from episode records."""

import pytest

from glm5.errors import DataError
from glm5.eval.statistics import bootstrap_mean, mean_of_intervals, wilson_interval
from glm5.eval.suites.tasksets import pass_at_1_rows, reward_part_rows
from glm5.records import Episode


def episodes(taskset, rewards, outcome="ok", first=0):
    return [Episode(episode_id=f"{taskset}{first + n}", group_id="g", task_id=f"{taskset}-{first + n}", taskset=taskset,
                    outcome=outcome, reward=reward) for n, reward in enumerate(rewards)]


def by_name(rows):
    return {row["name"]: row for row in rows}


def test_shares_intervals_and_their_mean():
    records = episodes("shell", [1.0] * 30 + [0.0] * 10) + episodes("repair", [1.0] * 5 + [0.9] * 15)
    rows = by_name(pass_at_1_rows("sft", records))
    shell, repair = wilson_interval(30, 40), wilson_interval(5, 20)
    assert rows["pass_at_1.sft.shell"] == {"name": "pass_at_1.sft.shell", "value": 0.75, "unit": "fraction", "n": 40,
                                           "low": shell.low, "high": shell.high}
    assert rows["pass_at_1.sft.repair"]["value"] == 0.25
    mean = mean_of_intervals([repair, shell])
    assert rows["pass_at_1.sft.mean"]["value"] == pytest.approx(0.5)
    assert (rows["pass_at_1.sft.mean"]["low"], rows["pass_at_1.sft.mean"]["high"]) == (mean.low, mean.high)


def test_what_was_not_measured_is_excluded_and_counted():
    records = (episodes("shell", [1.0, 0.0]) + episodes("shell", [None, 0.0], "infra_error", 10)
               + episodes("shell", [None], "ok", 20) + episodes("shell", [0.0], "truncated", 30)
               + episodes("shell", [0.0], "agent_error", 40) + episodes("shell", [None], "cancelled", 50))
    rows = by_name(pass_at_1_rows("rl", records))
    assert (rows["pass_at_1.rl.shell"]["value"], rows["pass_at_1.rl.shell"]["n"]) == (0.25, 4)
    excluded = {name: row["value"] for name, row in rows.items() if name.startswith("excluded")}
    assert excluded == {"excluded.rl.infra_error": 2, "excluded.rl.no_reward": 1, "excluded.rl.cancelled": 1}


def test_several_attempts_per_task_are_resampled_by_task():
    records = [record for number in range(6) for record in
               [Episode(episode_id=f"e{number}{n}", group_id="g", task_id=f"t{number}", taskset="shell", outcome="ok",
                        reward=float(number < 3)) for n in range(4)]]
    rows = by_name(pass_at_1_rows("rl", records))
    expected = bootstrap_mean([[1.0] * 4] * 3 + [[0.0] * 4] * 3)
    assert (rows["pass_at_1.rl.shell"]["low"], rows["pass_at_1.rl.shell"]["high"]) == (expected.low, expected.high)


def test_a_taskset_of_failures_only_is_an_error_and_not_a_zero():
    with pytest.raises(DataError, match=r"taskset repair has no episode that counts; excluded: \{'infra_error': 2\}"):
        pass_at_1_rows("rl", episodes("shell", [1.0]) + episodes("repair", [None, None], "infra_error"))
    with pytest.raises(DataError):
        pass_at_1_rows("rl", [])


def test_success_of_a_blended_reward_is_the_own_verifiers_and_parts_have_their_means():
    episodes = [
        Episode(episode_id=f"e{index}", group_id="g", task_id=f"w/heldout/{index}", taskset="w", outcome="ok",
                reward=reward, reward_parts=parts)
        for index, (reward, parts) in enumerate([(0.7, {"task": 1.0, "model": 0.4}), (0.0, {"task": 0.0}),
                                                 (0.9, {"task": 1.0, "model": 0.8})])]
    assert pass_at_1_rows("x", episodes)[0]["value"] == pytest.approx(2 / 3)
    rows = {row["name"]: (row["value"], row["n"]) for row in reward_part_rows("x", episodes)}
    assert rows == {"reward.x.w": (pytest.approx(1.6 / 3), 3), "reward.x.w.task": (pytest.approx(2 / 3), 3),
                    "reward.x.w.model": (pytest.approx(0.6), 2)}
