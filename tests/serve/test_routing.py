"""Where requests go: to the replica that got their beginning, unless it is dead or much busier."""

from __future__ import annotations

import pytest

from glm5.serve.metrics import Metrics, add_stats
from glm5.serve.routing import PrefixRouter


def router(count: int) -> PrefixRouter:
    made = PrefixRouter(count)
    made.is_alive = [True] * count
    return made


def test_turns_of_a_session_stay_together_and_sessions_spread() -> None:
    of = router(3)
    sessions = [bytes([65 + number]) * 600 for number in range(3)]
    homes = [of.choose(prompt) for prompt in sessions]
    assert sorted(homes) == [0, 1, 2]
    for number in range(3):
        of.finish(number)
    for turn in range(1, 4):
        for prompt, home in zip(sessions, homes, strict=True):
            assert of.choose(prompt + b"x" * 300 * turn) == home
            of.finish(home)
    assert of.loads == [0, 0, 0]


def test_a_much_busier_replica_is_passed_over_and_a_short_prompt_goes_to_the_idlest() -> None:
    of = router(2)
    prompt = b"p" * 512
    chosen = [of.choose(prompt) for _ in range(12)]
    # With loads a and b the owner takes one more while a <= 1.25 * (a + b) / 2 + 4: up to 11 alone, then the other one.
    assert chosen == [0] * 11 + [1]
    assert of.choose(b"short") == 1


def test_dead_and_excluded_replicas_get_nothing() -> None:
    of = PrefixRouter(2)
    assert of.choose(b"x") is None
    of.is_alive = [True, True]
    assert of.choose(b"y" * 256) == 0
    of.forget(0)
    assert of.choose(b"y" * 256) == 1
    assert of.choose(b"y" * 256, excluded=[1]) is None
    of.is_alive[0] = True
    of.finish(1)
    assert of.choose(b"y" * 256) == 1  # it computed the beginning meanwhile


def test_statistics_of_engines_add_up() -> None:
    one = {"steps": 3, "running": 2, "weight_version": 5, "uptime_s": 9.0, "acceptance_length": 2.0, "is_paused": True}
    other = {"steps": 4, "running": 1, "weight_version": 4, "uptime_s": 7.0, "acceptance_length": 1.0,
             "is_paused": False}
    found = add_stats([one, other, {"message": "replica 2: it is silent"}])
    expected = {"steps": 7, "running": 3, "weight_version": 4, "uptime_s": 9.0, "acceptance_length": 1.5,
                "is_paused": False}
    assert {name: found[name] for name in expected} == expected
    assert add_stats([])["steps"] == 0
    assert "glm5_steps_total 7\n" in Metrics().render(found)


@pytest.mark.parametrize("length", [0, 255, 256, 700])
def test_only_whole_pieces_are_remembered(length: int) -> None:
    of = router(1)
    assert of.choose(b"z" * length) == 0
    assert len(of._owners) == length // 256
