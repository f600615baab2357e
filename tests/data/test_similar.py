"""Similar texts end up in one sequence, cut at line starts, and no text is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.data import similar
from glm5.data.similar import group_similar, interleave


def family(topic: str, member: int) -> str:
    return "".join(f"{topic} {topic}-{line} is value {(line * 7 + member) % 50}\n" for line in range(30))


def test_groups_hold_one_topic_and_every_text_once() -> None:
    texts = [family(topic, member) for member in range(4) for topic in ("alpha", "zebra", "quick")]
    groups = group_similar(texts, [100] * len(texts), 350, 0.5)
    assert sorted(index for group in groups for index in group) == list(range(12))
    assert all(len({index % 3 for index in group}) == 1 for group in groups)
    assert sorted(map(len, groups)) == [1, 1, 1, 3, 3, 3]  # 350 tokens hold three
    assert [group[0] for group in groups] == [0, 1, 2, 9, 10, 11]


def test_nothing_is_grouped_below_the_threshold_or_beyond_the_length() -> None:
    texts = [family("alpha", 0), family("alpha", 1), "something else entirely\n", ""]
    assert group_similar(texts, [10] * 4, 100, 0.999) == [[0], [1], [2], [3]]
    assert group_similar(texts, [60] * 4, 100, 0.5) == [[0], [1], [2], [3]]
    assert group_similar(texts, [500, 10, 10, 10], 100, 0.5)[0] == [0]
    assert group_similar([], [], 100, 0.5) == []


def test_the_anchor_is_cut_into_equal_parts_around_the_others() -> None:
    anchor = "".join(f"line {number}\n" for number in range(6))
    text = interleave(anchor, ["first other", "second other\n"])
    assert text == (
        "line 0\nline 1\nfirst other\nline 2\nline 3\nsecond other\nline 4\nline 5\n"
    )
    assert interleave("alone", []) == "alone\n"


@given(st.lists(st.sampled_from(["a\n", "bb\n", "\n", "cccc"]), max_size=8).map("".join), st.integers(0, 4))
def test_the_anchor_is_kept_whole_and_in_order(anchor: str, count: int) -> None:
    pieces = interleave(anchor, [f"<{number}>\n" for number in range(count)])
    for number in range(count):
        assert pieces.count(f"<{number}>\n") == 1
        pieces = pieces.replace(f"<{number}>\n", "")
    assert pieces == anchor + ("\n" if anchor and not anchor.endswith("\n") else "")


def test_large_sets_are_compared_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(similar, "_BLOCK", 4)
    texts = [family("alpha", 0)] * 6
    assert group_similar(texts, [5] * 6, 100, 0.9) == [[0, 1, 2, 3], [4, 5]]
