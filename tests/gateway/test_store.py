"""Durability of sessions and turns."""

import asyncio
import resource
import sqlite3
import time

import pytest

from glm5.errors import GatewayError
from glm5.gateway.sessions import Node, SessionSettings
from glm5.gateway.store import Store
from glm5.records import SamplingParams


def node(turn_id, parent=None, size=3):
    return Node(turn_id=turn_id, parent=parent, kind="extend" if parent else "root", tail_ids=[1, 2],
                output_ids=[70000] * size, logprobs=[-0.1] * size, versions=[2] * size,
                finish_reason="stop", chain=b"c" * 16, num_messages=2, digest=b"d" * 16,
                answer={"choices": [{"message": {"role": "assistant", "content": "é"}}]})


def settings(session_id="s", **extra):
    return SessionSettings(session_id=session_id, **extra)


def with_store(path, use):
    """Open, use, close."""
    store = Store(path)
    try:
        return asyncio.run(use(store))
    finally:
        store.close()


def test_sessions_and_turns_come_back_as_they_were(tmp_path):
    first = node("s-1")
    second = node("s-2", first)
    sampling = SamplingParams(temperature=0.5, stop_token_ids=(7, 8), seed=3)
    given = settings(sampling=sampling, max_turns=4, enable_thinking=False)

    async def write(store):
        assert await store.create_session(given, "key")
        assert not await store.create_session(given, "another key")
        await store.add_turn("s", first)
        await store.add_turn("s", second)
        await store.set_abandoned("s-2", True)

    async def read(store):
        return await store.open_sessions(), await store.load_turns("s")

    with_store(tmp_path / "store.sqlite", write)
    (session,), (read_first, read_second) = with_store(tmp_path / "store.sqlite", read)
    assert session.settings == given and session.api_key == "key" and session.state == "open"
    assert read_second.parent is read_first and read_second.abandoned and not read_first.abandoned
    assert read_second.ids() == second.ids() == [1, 2, 70000, 70000, 70000, 1, 2, 70000, 70000, 70000]
    assert read_first.logprobs == first.logprobs and read_first.versions == first.versions
    assert read_first.answer == first.answer
    assert (read_first.chain, read_first.digest, read_first.num_messages) == (b"c" * 16, b"d" * 16, 2)


def test_a_turn_is_on_disk_when_add_turn_returns(tmp_path):
    async def use(store):
        await store.add_turn("s", node("s-1"))
        other = sqlite3.connect(tmp_path / "store.sqlite")
        try:
            return other.execute("SELECT count(*) FROM turns").fetchone()[0]
        finally:
            other.close()

    assert with_store(tmp_path / "store.sqlite", use) == 1


def test_a_failing_operation_fails_alone(tmp_path):
    async def use(store):
        await store.add_turn("s", node("s-1"))
        results = await asyncio.gather(store.add_turn("s", node("s-2")), store.add_turn("s", node("s-1")),
                                       store.add_turn("s", node("s-3")), return_exceptions=True)
        return results, await store.load_turns("s")

    results, turns = with_store(tmp_path / "store.sqlite", use)
    assert isinstance(results[1], GatewayError) and "UNIQUE" in str(results[1])
    assert [item.turn_id for item in turns] == ["s-1", "s-2", "s-3"]


def test_a_full_disk_is_reported_and_survived(tmp_path):
    async def use(store):
        await store.add_turn("s", node("s-1"))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
        try:
            with pytest.raises(GatewayError, match=r"store\.sqlite: .*free space on its disk"):
                await store.add_turn("s", node("s-2", size=100_000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        await store.add_turn("s", node("s-3"))
        return await store.load_turns("s")

    assert [item.turn_id for item in with_store(tmp_path / "store.sqlite", use)] == ["s-1", "s-3"]


def test_closed_sessions_are_purged_but_stay_known(tmp_path):
    async def use(store):
        for session_id in ("old", "open"):
            await store.create_session(settings(session_id), "key")
            await store.add_turn(session_id, node(f"{session_id}-1"))
        await store.close_session("old", "finished", "ok", 0.5)
        await store.purge(time.time() - 60)
        kept = await store.load_turns("old")
        finished = await store.find_session("old")
        await store.purge(time.time() + 60)
        return (kept, finished, await store.load_turns("old"), await store.find_session("old"),
                await store.load_turns("open"), await store.find_session("nobody"))

    kept, finished, gone, purged, untouched, nobody = with_store(tmp_path / "store.sqlite", use)
    assert len(kept) == 1 and (finished.state, finished.outcome, finished.reward) == ("finished", "ok", 0.5)
    assert gone == [] and purged.state == "purged"
    assert len(untouched) == 1 and nobody is None


def test_files_that_cannot_be_a_store_are_named(tmp_path):
    store = Store(tmp_path / "store.sqlite")
    with pytest.raises(GatewayError, match="in use by another gateway"):
        Store(tmp_path / "store.sqlite")
    store.close()
    (tmp_path / "text.sqlite").write_text("hello " * 1000)
    with pytest.raises(GatewayError, match=r"text\.sqlite: cannot be used as a store"):
        Store(tmp_path / "text.sqlite")
    newer = sqlite3.connect(tmp_path / "newer.sqlite")
    newer.execute("PRAGMA user_version = 99")
    newer.close()
    with pytest.raises(GatewayError, match="store format 99, expected 1"):
        Store(tmp_path / "newer.sqlite")
