"""Fill-in-the-middle: nothing is lost, the rates hold, the choice depends on the document alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.data.config import InfillingConfig
from glm5.data.infilling import MIDDLE_TOKEN, PREFIX_TOKEN, SUFFIX_TOKEN, arrange
from glm5.errors import ConfigError


@given(st.text(max_size=40), st.integers(0, 3))
def test_the_sections_put_together_are_the_text_and_the_middle_comes_last(text: str, copy: int) -> None:
    sections = arrange(text, "a.py", copy, InfillingConfig(rate=1.0))
    if not text:
        assert sections == [("", "")]
        return
    parts = dict(sections)
    assert set(parts) == {PREFIX_TOKEN, SUFFIX_TOKEN, MIDDLE_TOKEN}
    assert parts[PREFIX_TOKEN] + parts[MIDDLE_TOKEN] + parts[SUFFIX_TOKEN] == text
    assert sections[-1][0] == MIDDLE_TOKEN


def test_rates_hold_over_many_documents_and_cuts_are_uniform() -> None:
    config = InfillingConfig(rate=0.6, suffix_first=0.25)
    text = "x" * 1000
    arranged = [arrange(text, f"file{number}", 0, config) for number in range(3000)]
    changed = [sections for sections in arranged if len(sections) == 3]
    suffix_first = [sections for sections in changed if sections[0][0] == SUFFIX_TOKEN]
    assert 0.57 < len(changed) / 3000 < 0.63
    assert 0.21 < len(suffix_first) / len(changed) < 0.29
    middles = [len(dict(sections)[MIDDLE_TOKEN]) for sections in changed]
    assert 310 < sum(middles) / len(middles) < 357  # two uniform cuts leave a third between them


def test_the_choice_depends_on_name_and_copy_alone() -> None:
    config = InfillingConfig(rate=0.5)
    first = [arrange("some text", f"f{number}", 0, config) for number in range(50)]
    assert first == [arrange("some text", f"f{number}", 0, config) for number in range(50)]
    assert first != [arrange("some text", f"f{number}", 1, config) for number in range(50)]
    assert arrange("some text", "f", 0, InfillingConfig()) == [("", "some text")]


@pytest.mark.parametrize("config", [{"rate": 1.1}, {"suffix_first": -0.1}])
def test_rates_outside_zero_to_one_are_refused(config: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"must lie in \[0, 1\]"):
        InfillingConfig(**config)
