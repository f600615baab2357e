"""Consistent hashing with bounded load."""

from collections import Counter

import pytest

from glm5.errors import GatewayError
from glm5.gateway.router import LOAD_FACTOR, Router

ENGINES = ["http://a:1", "http://b:1/", "http://c:1", "http://d:1"]


def test_a_session_keeps_its_engine_and_another_router_chooses_the_same():
    first, second = Router(ENGINES), Router(ENGINES)
    for number in range(3):  # few enough that the bound does not act
        assert first.choose(f"s{number}") == first.choose(f"s{number}") == second.choose(f"s{number}")


def test_load_stays_below_the_bound():
    router = Router(ENGINES)
    for number in range(1, 201):
        router.choose(f"s{number}")
        loads = [router.num_sessions(url) for url in router.engine_urls]
        assert sum(loads) == number
        assert max(loads) <= LOAD_FACTOR * number / len(loads) + 1


def test_only_the_sessions_of_a_dead_engine_move():
    router = Router(ENGINES)
    before = {f"s{number}": router.choose(f"s{number}") for number in range(64)}
    router.mark_dead("http://b:1")
    after = {session: router.choose(session) for session in before}
    moved = {session for session in before if before[session] != after[session]}
    assert moved == {session for session, url in before.items() if url == "http://b:1"}
    assert "http://b:1" not in after.values()
    assert max(Counter(after.values()).values()) <= LOAD_FACTOR * 64 / 3 + 1
    router.mark_alive("http://b:1")
    assert {session: router.choose(session) for session in before} == after
    assert "http://b:1" in {router.choose(f"new{number}") for number in range(64)}


def test_released_sessions_free_their_place():
    router = Router(ENGINES[:1])
    router.choose("s")
    assert router.num_sessions("http://a:1") == 1
    router.release("s")
    router.release("never seen")
    assert router.num_sessions("http://a:1") == 0


def test_no_engine_is_chosen_while_all_are_dead():
    router = Router(ENGINES[:1])
    router.choose("s")
    router.mark_dead("http://a:1")
    assert router.choose("s") is None
    router.mark_alive("http://a:1")
    assert router.choose("s") == "http://a:1"
    with pytest.raises(GatewayError, match="--engine"):
        Router([])
