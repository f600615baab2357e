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
    assert router.num_moves == 0


def test_only_the_sessions_of_a_dead_engine_move():
    router = Router(ENGINES)
    before = {f"s{number}": router.choose(f"s{number}") for number in range(64)}
    router.mark_dead("http://b:1")
    after = {session: router.choose(session) for session in before}
    moved = {session for session in before if before[session] != after[session]}
    assert moved == {session for session, url in before.items() if url == "http://b:1"}
    assert "http://b:1" not in after.values()
    assert max(Counter(after.values()).values()) <= LOAD_FACTOR * 64 / 3 + 1
    assert router.num_moves == len(moved)
    router.mark_alive("http://b:1")
    assert {session: router.choose(session) for session in before} == after
    assert "http://b:1" in {router.choose(f"new{number}") for number in range(64)}


def test_a_draining_engine_loses_its_sessions_before_their_next_turns_and_gets_no_new_ones():
    router = Router(ENGINES)
    before = {f"s{number}": router.choose(f"s{number}") for number in range(64)}
    router.drain("http://b:1/")
    assert router.is_draining("http://b:1") and router.is_alive("http://b:1")
    count = router.num_sessions("http://b:1")
    assert count > 0  # nothing moves by itself
    after = {session: router.choose(session) for session in before}
    assert router.num_sessions("http://b:1") == 0 and router.num_moves == count
    assert {session for session in before if before[session] != after[session]} == {
        session for session, url in before.items() if url == "http://b:1"}
    assert "http://b:1" not in {router.choose(f"new{number}") for number in range(64)}
    router.add("http://b:1")
    assert "http://b:1" in {router.choose(f"more{number}") for number in range(64)}


def test_the_last_engine_cannot_be_drained_and_serves_on_when_the_others_die():
    router = Router(ENGINES[:2])
    with pytest.raises(GatewayError, match="not an engine"):
        router.drain("http://z:1")
    router.drain("http://a:1")
    with pytest.raises(GatewayError, match="no other engine"):
        router.drain("http://b:1")
    assert router.choose("s") == "http://b:1"
    router.mark_dead("http://b:1")
    assert router.choose("s") is None


def test_sessions_move_to_an_engine_that_joins_until_the_load_is_even_enough():
    router = Router(ENGINES[:3])
    sessions = [f"s{number}" for number in range(60)]
    for session in sessions:
        router.choose(session)
    router.add("http://d:1")
    for _ in range(3):
        for session in sessions:
            router.choose(session)
    loads = [router.num_sessions(url) for url in router.engine_urls]
    assert router.num_moves == 0 and loads[3] == 0  # 23 is within 1.5 times the mean of 15, and one
    router.mark_dead("http://a:1")
    router.mark_dead("http://b:1")
    for session in sessions:
        router.choose(session)
    router.mark_alive("http://a:1")
    router.mark_alive("http://b:1")
    for session in sessions:
        router.choose(session)
    loads = [router.num_sessions(url) for url in router.engine_urls]
    assert sum(loads) == 60 and max(loads) <= 1.5 * 15 + 2


def test_sessions_that_end_move_no_other_session():
    router = Router(ENGINES)
    placed = {f"s{number}": router.choose(f"s{number}") for number in range(64)}
    stay = "http://a:1"
    for session, url in placed.items():
        if url != stay:
            router.release(session)
    left = [session for session, url in placed.items() if url == stay]
    assert len(left) > 8 and all(router.choose(session) == stay for session in left)
    assert router.num_moves == 0
    assert router.choose("late") != stay  # it is above the bound, so what is new goes elsewhere


def test_an_engine_that_comes_back_is_given_sessions_by_the_load_of_now():
    router = Router(ENGINES)
    for number in range(64):
        router.choose(f"s{number}")
    back = "http://a:1"
    router.mark_dead(back)
    for number in range(64):
        router.choose(f"s{number}")
    for number in range(16, 64):
        router.release(f"s{number}")
    router.mark_alive(back)
    before = router.num_moves
    for number in range(16):
        router.choose(f"s{number}")
    # the mean is 4 now: an engine may hold 1.5 x 4 + 1 = 7 of the 16 sessions, not 1.5 x 16 + 1
    assert max(router.num_sessions(url) for url in router.engine_urls) <= 7
    for number in range(16):
        router.choose(f"s{number}")
    assert router.num_moves - before <= 16


def test_an_engine_that_was_only_slow_keeps_the_sessions_that_had_no_turn_meanwhile():
    router = Router(ENGINES)
    placed = {f"s{number}": router.choose(f"s{number}") for number in range(64)}
    slow = "http://a:1"
    own = [session for session, url in placed.items() if url == slow]
    router.mark_dead(slow)
    assert router.choose(own[0]) != slow
    router.mark_alive(slow)
    assert all(router.choose(session) == slow for session in own[1:]) and router.num_moves == 1


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
