"""What the report says of skills, from rows that were measured."""

import json
from types import SimpleNamespace

import pytest

from glm5.rl.config import RLConfig
from glm5.rl.credit import TeacherConfig
from glm5.run_report import _cost_rows, _distilled_rows, _skill_rows, agentic

REASONING = RLConfig(name="reasoning", tasksets={"maths": 1.0, "code": 1.0})
AGENTIC = RLConfig(name="rl", tasksets={"shell": 1.0})
DISTILL = RLConfig(name="distill", teachers={
    "reasoning": TeacherConfig(checkpoint="stage:reasoning", tasksets={"maths": 1.0, "code": 1.0}),
    "agentic": TeacherConfig(checkpoint="stage:rl", tasksets={"shell": 1.0})})


def measured(run_dir, label, **values):
    rows = [{"name": f"pass_at_1.{label}.{name}", "value": value, "unit": "fraction", "n": 100, "low": value - 0.1,
             "high": value + 0.1} for name, value in values.items()]
    (run_dir / "rows").mkdir(exist_ok=True)
    (run_dir / "rows" / f"pass_at_1.{label}.json").write_text(json.dumps(rows))


@pytest.fixture
def run_dir(tmp_path):
    measured(tmp_path, "sft", maths=0.2, code=0.4, shell=0.5, mean=0.5)
    measured(tmp_path, "reasoning", maths=0.5, code=0.6, shell=0.45, mean=0.55)
    measured(tmp_path, "rl", maths=0.3, code=0.62, shell=0.75, mean=0.75)
    measured(tmp_path, "distill", maths=0.485, code=0.5, shell=0.8, mean=0.595)
    return tmp_path


def by_name(rows):
    return {row["name"]: row for row in rows}


def test_a_stage_is_compared_with_what_sft_left_of_its_own_tasksets(run_dir):
    rows = by_name(_skill_rows(run_dir, REASONING))
    assert rows["pass_at_1.reasoning.maths"]["baseline"] == "pass_at_1.sft.maths"
    assert rows["pass_at_1.reasoning.maths"]["ratio"] == pytest.approx(2.5) and rows["pass_at_1.reasoning.maths"]["met"]
    assert "goal" not in rows["pass_at_1.reasoning.shell"]
    mean = rows["pass_at_1.reasoning.mean"]
    assert mean["baseline"] == pytest.approx(0.3) and mean["met"]


def test_the_agentic_stage_has_its_twenty_points(run_dir):
    mean = by_name(_skill_rows(run_dir, AGENTIC))["pass_at_1.rl.mean"]
    assert (mean["baseline"], mean["goal"]) == ("pass_at_1.sft.mean", "20 points above, intervals apart")
    assert mean["met"]
    measured(run_dir, "rl", maths=0.3, code=0.6, shell=0.69, mean=0.69)
    assert not by_name(_skill_rows(run_dir, AGENTIC))["pass_at_1.rl.mean"]["met"]


def test_every_skill_is_held_against_its_best_teacher(run_dir):
    rows = by_name(_distilled_rows(run_dir, DISTILL, AGENTIC))
    assert rows["pass_at_1.distill.maths"]["baseline"] == "pass_at_1.reasoning.maths"
    assert rows["pass_at_1.distill.code"]["baseline"] == "pass_at_1.rl.code"  # a teacher of other tasksets was better
    assert rows["lost.rl.maths"]["value"] == pytest.approx(0.2)
    assert rows["lost.distill.maths"]["value"] == pytest.approx(0.015) and rows["lost.distill.maths"]["met"]
    assert rows["lost.distill.code"]["value"] == pytest.approx(0.12) and not rows["lost.distill.code"]["met"]
    assert rows["lost.distill.shell"]["value"] == pytest.approx(-0.05) and rows["lost.distill.shell"]["met"]
    assert rows["lost.rl.shell"]["value"] == pytest.approx(0.0)


def test_the_agentic_stage_is_found_by_its_name():
    assert agentic([REASONING, AGENTIC, DISTILL]) is AGENTIC
    assert agentic([REASONING]) is REASONING


@pytest.mark.parametrize(("goal_s", "met"), [(120, True), (90, False)])
def test_a_run_is_held_against_the_time_it_may_take(tmp_path, goal_s, met):
    clock = SimpleNamespace(seconds={"run": 100.04, "sft": 7.0}, peak_rss_bytes=10**9)
    rows = by_name(_cost_rows(tmp_path, [], clock, goal_s))
    assert (rows["wall_s.run"]["value"], rows["wall_s.run"]["met"]) == (100.0, met)
    assert "goal" not in rows["wall_s.sft"]
    assert "goal" not in by_name(_cost_rows(tmp_path, [], clock, 0))["wall_s.run"]
