"""Prefill in one engine, decoding in another: the same tokens, and nothing computed twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from glm5.engine.handover import CachedPrefix
from glm5.errors import ConfigError, EngineError
from glm5.model.transformer import GlmMoeDsaForCausalLM
from glm5.records import SamplingParams
from glm5.serve.app import build_app
from glm5.serve.config import ServeConfig
from glm5.serve.handover import PrefillPeer
from glm5.tokenizer.bpe import train_tokenizer

from .conftest import MakeEngine
from .test_engine import WAIT_S, cache_bytes, greedy, prompts, sampled

PROMPT = prompts(1, seed=21, low=90, high=91)[0]


def fill(engine, ids: list[int]) -> CachedPrefix:
    engine.submit(ids, SamplingParams(max_new_tokens=0)).result(WAIT_S)
    prefix = engine.export_prefix(ids)
    return CachedPrefix.from_bytes(prefix.to_bytes(), prefix.length, prefix.version)


@pytest.mark.parametrize("speculative", [0, 2])
def test_an_imported_prefix_gives_the_tokens_of_one_that_was_computed(make_engine: MakeEngine, speculative: int) -> None:
    filler, decoder = make_engine(speculative=speculative), make_engine(speculative=speculative)
    prefix = fill(filler, PROMPT)
    assert prefix.length == len(PROMPT) and decoder.cached_length(PROMPT) == 0
    decoder.import_prefix(PROMPT, prefix)
    assert decoder.cached_length(PROMPT) == len(PROMPT)
    for params in (greedy(20), sampled(20, seed=4)):
        found = decoder.submit(PROMPT, params).result(WAIT_S)
        assert found.output_ids == filler.submit(PROMPT, params).result(WAIT_S).output_ids
        assert found.cached_tokens >= len(PROMPT) - 2
    assert decoder.stats().prefilled_tokens <= 4


def test_keys_of_other_weights_or_another_layout_are_refused(
    model: GlmMoeDsaForCausalLM, make_engine: MakeEngine, checkpoints: tuple[Path, Path]
) -> None:
    prefix = fill(make_engine(), PROMPT)
    with pytest.raises(EngineError, match="use equal engines"):
        make_engine(block_size=16).import_prefix(PROMPT, prefix)
    other = make_engine()
    assert other.update_weights(checkpoints[1], 1).success
    with pytest.raises(EngineError, match="weight version 0, 1 is in force"):
        other.import_prefix(PROMPT, prefix)
    assert other.cached_length(PROMPT) == 0 and other.stats().cache_blocks_used == 0
    small = make_engine(cache_bytes=cache_bytes(model, 64))
    small.import_prefix(PROMPT, prefix)  # there is no room: it takes nothing
    assert small.cached_length(PROMPT) == 0
    with pytest.raises(EngineError, match="damaged"):
        CachedPrefix.from_bytes(b"nothing", 3, 0)


def test_a_decoding_server_fetches_long_prompts_and_survives_its_peer(make_engine: MakeEngine) -> None:
    filler, decoder = make_engine(), make_engine()
    tokenizer = train_tokenizer(["plain words"], 300)
    app = build_app(filler, tokenizer, "tiny", ServeConfig(role="prefill"))
    expected = filler.submit(PROMPT, greedy(8)).result(WAIT_S).output_ids

    async def work() -> None:
        peer = PrefillPeer("http://filler", decoder)
        await peer.close()
        peer._client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://filler")
        await peer.fetch(PROMPT[:20])  # too short to ask
        assert decoder.cached_length(PROMPT) == 0
        await peer.fetch(PROMPT)
        assert decoder.cached_length(PROMPT) == len(PROMPT) == peer.fetched_tokens
        await peer.close()
        broken = PrefillPeer("http://127.0.0.1:1", decoder)
        await broken.fetch(PROMPT[::-1])  # logs and leaves the work to the engine
        await broken.close()

    asyncio.run(work())
    assert decoder.submit(PROMPT, greedy(8)).result(WAIT_S).output_ids == expected
    assert decoder.stats().prefilled_tokens == 1


def test_a_peer_belongs_to_the_role_decode() -> None:
    for wrong in ({"role": "decode"}, {"peer": "http://x"}, {"role": "both", "peer": "http://x"}, {"role": "none"}):
        with pytest.raises(ConfigError, match="role="):
            ServeConfig(**wrong)
