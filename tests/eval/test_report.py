"""Result files, reports and their comparison."""

import json
import struct

import pytest

from glm5.errors import ConfigError, DataError
from glm5.eval.figures import require_matplotlib, running_mean
from glm5.eval.report import (
    Row,
    build_report,
    compare,
    describe,
    format_value,
    read_results,
    results_object,
    reward_series,
)

ROWS = [
    Row(name="pass_at_1.sft.shell", value=0.25, unit="fraction", n=240, low=0.199, high=0.308),
    Row(name="pass_at_1.rl.shell", value=0.75, unit="fraction", n=240, low=0.692, high=0.8,
        baseline="pass_at_1.sft.shell", ratio=3.0, goal="not below", met=True),
]
COST = [{"name": "peak_rss_bytes", "value": 2_500_000_000, "unit": "bytes", "goal": "under 2 GB", "met": False},
        {"name": "wall_s.run", "value": 1019.04, "unit": "s"}]
STALENESS = [{"name": "staleness.0", "value": 300, "unit": "episodes"},
             {"name": "staleness.1", "value": 100, "unit": "episodes"}]
CURVE = [{"step": 1, "reward": 0.1, "reward.shell": 0.0}, {"step": 2, "reward": 0.2, "reward.shell": 0.1, "loss": 3},
         {"step": 2, "reward": 0.3, "reward.shell": 0.2}, {"step": 3, "loss": 2}]


def test_a_result_has_the_keys_of_the_schema_and_only_those_that_apply():
    result = results_object("run nano", [ROWS[1], COST[1]])
    assert list(result) == ["command", "commit", "hardware", "rows"]
    assert result["command"] == "run nano" and result["commit"] and "cores" in result["hardware"]
    assert result["rows"] == [
        {"name": "pass_at_1.rl.shell", "value": 0.75, "unit": "fraction", "n": 240, "low": 0.692, "high": 0.8,
         "baseline": "pass_at_1.sft.shell", "ratio": 3.0, "goal": "not below", "met": True},
        {"name": "wall_s.run", "value": 1019.04, "unit": "s"}]
    json.dumps(result)


@pytest.mark.parametrize("row", [{"name": "x", "value": 1}, {"name": "x", "value": 1, "unit": "s", "hihg": 2}])
def test_rows_with_wrong_keys_are_refused(row):
    with pytest.raises(DataError, match=r"result row 'x': key '(unit|hihg)'"):
        results_object("bench", [row])


def test_a_report_shows_every_section_number_and_meaning(tmp_path):
    sections = {"Skills": ROWS, "Staleness": STALENESS, "Cost": COST, "Empty": []}
    path = build_report(tmp_path, "run nano", sections, {"rl": CURVE, "distill": []})
    text = path.read_text()
    assert path == tmp_path / "report.md"
    cells = ["`pass_at_1.rl.shell`", "0.75", "0.692 – 0.800", "240", "fraction", "`pass_at_1.sft.shell`", "3.000",
             "not below", "yes"]
    assert f"| {' | '.join(cells)} |" in text
    assert "| `peak_rss_bytes` | 2.50 GB | bytes | under 2 GB | **no** |" in text
    assert "| 0 | 300 | 75.0% | " + "█" * 30 + " |" in text and "| 1 | 100 | 25.0% |" in text
    assert "`staleness.0` |" not in text
    assert "- `pass_at_1.sft.shell`: share of held-out tasks of a taskset solved at the first attempt, after" in text
    assert "## Empty\n\nNothing was measured." in text
    assert "(rl_curve.png)" in text
    stored = read_results(tmp_path)
    assert [row["name"] for row in stored["rows"]] == [
        "pass_at_1.sft.shell", "pass_at_1.rl.shell", "staleness.0", "staleness.1", "peak_rss_bytes", "wall_s.run"]


def test_every_stage_has_its_histogram_of_ages(tmp_path):
    ages = [{"name": f"reasoning.staleness.{age}", "value": count, "unit": "episodes"}
            for age, count in ((1, 1), (0, 3))]
    text = build_report(tmp_path, "run", {"Reasoning": ages}).read_text()
    assert "| 0 | 3 | 75.0% |" in text and "`reasoning.staleness.0` |" not in text


def test_the_curve_is_a_png_of_its_size(tmp_path):
    build_report(tmp_path, "run", {"Cost": COST}, {"rl": CURVE})
    data = (tmp_path / "rl_curve.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (960, 540)


def test_a_report_without_a_curve_needs_no_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    build_report(tmp_path, "run", {"Cost": COST})
    assert not (tmp_path / "rl_curve.png").exists()
    with pytest.raises(ConfigError, match=r"glm5\[report\]"):
        build_report(tmp_path, "run", {"Cost": COST}, {"rl": CURVE})
    with pytest.raises(ConfigError, match=r"glm5\[report\]"):
        require_matplotlib()


def test_reward_lines_keep_the_last_record_of_a_repeated_step():
    whole, shell = reward_series(CURVE)
    assert (whole.label, whole.x, whole.y) == ("all", [1.0, 2.0], [0.1, 0.3])
    assert (shell.label, shell.x, shell.y) == ("shell", [1.0, 2.0], [0.0, 0.2])
    assert reward_series([{"step": 1, "loss": 2.0}]) == []


def test_running_mean_looks_back_only():
    assert running_mean([1, 2, 3, 4], 2) == [1, 1.5, 2.5, 3.5]
    assert running_mean([5], 3) == [5]


@pytest.mark.parametrize(("value", "unit", "text"), [
    (0.123456, "fraction", "0.1235"), (1234567, "tokens", "1,234,567"), (1234.56, "s", "1234.6"), (None, "s", "–"),
    (2.5e9, "bytes", "2.50 GB"), (2_500_000, "bytes", "2.50 MB"), (12.0, "s", "12")])
def test_numbers_are_written_for_people(value, unit, text):
    assert format_value(value, unit) == text


def test_names_are_matched_part_by_part():
    assert describe("wall_s.run") != describe("wall_s.pretrain") != ""
    assert describe("pass_at_1.rl.shell") == "the same after agentic reinforcement learning"
    assert describe("pass_at_1.rl.mean") == "unweighted mean over the tasksets of the stage"
    assert describe("reasoning.staleness.0") == "trained episodes of an RL stage by age in trainer steps"
    assert describe("lost.distill.maths").startswith("pass@1 of the best teacher")
    assert describe("episodes.infra_error") == "RL episodes by what became of them"
    assert describe("wall_s.a.b") == "" and describe("xwall_s.run") == ""


def test_two_files_are_compared_by_name(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(results_object("run a", [*ROWS, COST[1]])))
    better = [{**ROWS[0].to_json(), "value": 0.5, "low": 0.44, "high": 0.56},
              {**ROWS[1].to_json(), "value": 0.7, "low": 0.64}, {"name": "new", "value": 1, "unit": "x"}]
    (tmp_path / "b.json").write_text("progress\nmore\n" + json.dumps(results_object("run b", better)) + "\n")
    lines = compare(tmp_path / "a.json", tmp_path / "b.json").splitlines()
    assert lines[0].startswith("A: run a") and lines[1].startswith("B: run b")
    table = {line.split()[0]: line for line in lines[3:]}
    assert "0.25 (0.199 – 0.308)" in table["pass_at_1.sft.shell"] and "2.000" in table["pass_at_1.sft.shell"]
    assert table["pass_at_1.sft.shell"].endswith("intervals apart")
    assert table["pass_at_1.rl.shell"].endswith("intervals overlap")
    assert table["wall_s.run"].split()[1:3] == ["1019.0", "–"] and table["new"].split()[1:3] == ["–", "1"]


@pytest.mark.parametrize("content", ["", "text", "[1]", '{"rows": []}'])
def test_files_without_results_are_named(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(DataError, match=r"x\.json: no results"):
        read_results(tmp_path / "x.json")
    with pytest.raises(DataError, match=r"missing\.json: cannot be read"):
        compare(tmp_path / "missing.json", tmp_path / "x.json")
