"""The regression gate by hand."""

import pytest

from glm5.continual.gate import gate_rows, refusal
from glm5.errors import DataError


def outcomes(solved, total=10, taskset="t"):
    return {f"{taskset}/heldout/{index}": index < solved for index in range(total)}


def change(before, after, max_drop=0.02):
    rows = gate_rows(before, after, max_drop)
    return {row["name"]: row for row in rows}, refusal(rows)


def test_an_equal_and_a_better_model_pass():
    rows, told = change(outcomes(5), outcomes(5))
    assert told == "" and rows["gate.change.t"]["value"] == 0.0 and rows["pass_at_1.before.t"]["value"] == 0.5
    rows, told = change(outcomes(5), outcomes(7))
    assert told == "" and rows["gate.change.t"]["value"] == pytest.approx(0.2)
    assert rows["gate.change.t"]["low"] <= 0.2 <= rows["gate.change.t"]["high"]


def test_a_worse_model_is_refused_and_the_bound_itself_is_allowed():
    rows, told = change(outcomes(5), outcomes(4))
    assert told == "refused: pass@1 fell on t by 0.100 (allowed 0.020); nothing was published"
    assert rows["gate.change.t"]["met"] is False
    assert change(outcomes(5), outcomes(4), max_drop=0.1)[1] == ""


def test_one_bad_taskset_is_enough():
    before = {**outcomes(5), **outcomes(5, taskset="u")}
    assert "fell on u by 0.500" in change(before, {**outcomes(10), **outcomes(0, taskset="u")})[1]


def test_only_tasks_that_were_measured_twice_count():
    before, after = outcomes(10), outcomes(10)
    for index in range(4):
        del after[f"t/heldout/{index}"]
    rows, told = change(before, after)
    assert rows["gate.change.t"]["n"] == 6 and told == ""
    for index in range(4, 8):
        del after[f"t/heldout/{index}"]
    with pytest.raises(DataError, match="2 of 10 tasks"):
        change(before, after)
    with pytest.raises(DataError, match="no held-out task"):
        change({}, {})
