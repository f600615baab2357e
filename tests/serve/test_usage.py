"""Token counts on their way from a replica to the access log of the process in front."""

from __future__ import annotations

import pytest

from glm5.serve.usage import read_usage, split_comment, write_comment

USAGE = {"prompt_tokens": 7, "cached_tokens": 4, "output_tokens": 3}
EVENT = b'data: {"text": ": usage {\\"prompt_tokens\\": 1}"}\n\n'


@pytest.mark.parametrize("before", [b"", EVENT, EVENT * 2])
def test_a_comment_is_taken_out_of_the_end_of_a_stream(before: bytes) -> None:
    assert split_comment(before + write_comment(USAGE)) == (before, USAGE)


@pytest.mark.parametrize("events", [b"", EVENT, b"data: [DONE]\n\n", b": keep-alive\n\n", b": usage nonsense\n\n"])
def test_streams_without_one_stay_as_they_are(events: bytes) -> None:
    assert split_comment(events) == (events, None)


def test_headers_that_say_nothing_are_none() -> None:
    assert read_usage(None) is None and read_usage("[1]") is None and read_usage("{") is None
    assert read_usage('{"output_tokens": 2}') == {"output_tokens": 2}
