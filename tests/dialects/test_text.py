"""Incremental text against decoding everything at once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.dialects.text import Detokenizer, StopText
from glm5.tokenizer.bpe import train_tokenizer

TOKENIZER = train_tokenizer(["plain words, über 日本語 😀 " * 30], 320)


@settings(deadline=None)
@given(st.text(max_size=40), st.lists(st.integers(1, 4), min_size=1, max_size=60))
def test_pieces_add_up_and_never_split_a_character(text: str, sizes: list[int]) -> None:
    detokenizer, ids = Detokenizer(TOKENIZER), TOKENIZER.encode(text)
    pieces, start = [], 0
    for size in sizes * 200:
        if start >= len(ids):
            break
        pieces.append(detokenizer.feed(ids[start : start + size]))
        start += size
    so_far = "".join(pieces)
    assert text.startswith(so_far)
    assert so_far + detokenizer.finish() == text


@settings(deadline=None)
@given(st.lists(st.integers(0, 300), max_size=120))
def test_garbage_ids_stream_to_what_decode_gives(ids: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.feed([token]) for token in ids]
    assert "".join(pieces) + detokenizer.finish() == TOKENIZER.decode(ids)


def test_endless_invalid_bytes_do_not_pile_up() -> None:
    tokenizer = TOKENIZER
    continuation = tokenizer.encode("é")[-1]
    lone = next(token for token in range(tokenizer.vocab_size) if tokenizer.decode([token]) == "\ufffd")
    for token in {continuation, lone}:
        detokenizer = Detokenizer(tokenizer)
        text = "".join(detokenizer.feed([token]) for _ in range(500))
        assert text + detokenizer.finish() == tokenizer.decode([token] * 500)
        if tokenizer.decode([token]) == "\ufffd":
            assert len(text) > 450


@settings(deadline=None)
@given(st.text("abS", max_size=30), st.lists(st.text("abS", min_size=1, max_size=4), max_size=3), st.integers(1, 5))
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str], size: int) -> None:
    stop_text = StopText(stops)
    found = "".join(stop_text.feed(text[start : start + size]) for start in range(0, len(text), size))
    found += stop_text.finish()
    first = min((text.find(stop) for stop in stops if stop in text), default=None)
    if first is None:
        assert found == text and stop_text.matched is None
    else:
        assert text.startswith(found) and stop_text.matched in stops
        assert not any(stop in found for stop in stops)


def test_a_stop_string_cut_by_pieces_is_found() -> None:
    stop_text = StopText(["<end>"])
    assert [stop_text.feed(piece) for piece in ("abc<e", "n", "d>xyz", "more")] == ["abc", "", "", ""]
    assert stop_text.matched == "<end>"
    harmless = StopText(["<end>"])
    assert harmless.feed("a<en") + harmless.feed("ough") + harmless.finish() == "a<enough"
