"""Real server processes beyond the plain one: prefill and decode apart, quantised checkpoints, rounded caches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from glm5.model.checkpoint import load_model
from glm5.model.quantize.export import Transforms, Variant, quantise_checkpoint
from glm5.model.quantize.plan import QuantisationPlan
from glm5.process import spawn, stop, wait_ready

from .conftest import Server, write_checkpoint

PROMPT = [(7 * k * k) % 310 for k in range(200)]
PLANS = {
    "fp8": QuantisationPlan(experts="fp8", attention="fp8", mlp="fp8"),
    "int8": QuantisationPlan(experts="int8", attention="int8", mlp="int8"),
    "int4": QuantisationPlan(experts="int4", attention="int4", mlp="int4", group_size=16),
}


@contextmanager
def serving(directory: Path, root: Path, *options: str) -> Iterator[tuple[str, Any]]:
    """URL and process of a server; it is stopped at the end."""
    ready, log = root / "ready.json", root / "serve.log"
    words = ["serve", str(directory), "--port", "0", "--ready-file", str(ready), "--max-slots", "4", "--threads", "1"]
    process = spawn([*words, *options], log, {"OMP_NUM_THREADS": "1"})
    try:
        yield wait_ready(process, ready, log, 180), process
    finally:
        stop(process)


def generate(url: str, ids: list[int], new: int, **params: Any) -> dict[str, Any]:
    settings = {"temperature": 0, "max_new_tokens": new, "stop_token_ids": [], **params}
    answer = httpx.post(f"{url}/generate", json={"input_ids": ids, "sampling_params": settings}, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_two_processes_prefill_and_decode_what_one_would(checkpoint: Path, server: Server, tmp_path: Path) -> None:
    (tmp_path / "prefill").mkdir()
    (tmp_path / "decode").mkdir()
    context = ("--max-context", "900")
    with serving(checkpoint, tmp_path / "prefill", *context, "--role", "prefill") as (peer_url, peer):
        options = (*context, "--role", "decode", "--peer", peer_url)
        with serving(checkpoint, tmp_path / "decode", *options) as (url, _):
            for params in ({}, {"temperature": 0.8, "seed": 5}):
                expected = generate(server.url, PROMPT, 20, **params)
                found = generate(url, PROMPT, 20, **params)
                assert found["output_ids"] == expected["output_ids"]
                assert found["cached_tokens"] == len(PROMPT) - 1  # the last one is computed for its logits
            stats, filled = (httpx.get(f"{one}/stats").json() for one in (url, peer_url))
            assert stats["prefilled_tokens"] == 2 and filled["prefilled_tokens"] >= len(PROMPT)
            assert filled["generated_tokens"] == 0
            stop(peer)
            other = PROMPT[::-1]
            found = generate(url, other, 10)  # the peer is dead: computed here
            assert found["output_ids"] == generate(server.url, other, 10)["output_ids"]
            assert found["cached_tokens"] == 0
        assert "computing the prompt here" in (tmp_path / "decode" / "serve.log").read_text()


@pytest.mark.parametrize(("name", "cache_dtype"), [("fp8", "auto"), ("int8", "int8"), ("int4", "auto")])
def test_quantised_checkpoints_are_served_and_exchanged(name: str, cache_dtype: str, checkpoint: Path, server: Server,
                                                        tmp_path: Path) -> None:
    ids = torch.arange(64).view(2, 32)
    write_checkpoint(tmp_path / "next", 1)
    for source, target in ((checkpoint, "first"), (tmp_path / "next", "second")):
        variant = Variant(plan=PLANS[name], transforms=Transforms(rotation="none", scaling=False))
        quantise_checkpoint(source, tmp_path / target, {"q": variant}, ids, ids)
    plain = httpx.post(f"{server.url}/generate", timeout=120, json={
        "input_ids": PROMPT[:40], "return_prompt_logprob": True, "sampling_params": {"max_new_tokens": 0}}).json()
    exact = torch.tensor(plain["prompt_logprobs"][1:])
    with serving(tmp_path / "first", tmp_path, "--max-context", "200", "--cache-dtype", cache_dtype) as (url, _):
        body = {"input_ids": PROMPT[:40], "return_prompt_logprob": True, "sampling_params": {"max_new_tokens": 0}}
        rounded = torch.tensor(httpx.post(f"{url}/generate", json=body, timeout=120).json()["prompt_logprobs"][1:])
        assert rounded.isfinite().all() and (rounded - exact).abs().mean() > 0
        if cache_dtype == "auto":  # what is served is the quantised model, but for inputs that round to the next level
            with torch.no_grad():
                logits = load_model(tmp_path / "first")(torch.tensor([PROMPT[:40]])).logits[0, :-1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(PROMPT[1:40])[:, None])[:, 0]
            torch.testing.assert_close(rounded, expected, rtol=0, atol=0.1)
        before = generate(url, PROMPT[:40], 8)
        body = {"model_path": str(tmp_path / "second"), "weight_version": 1}
        assert httpx.post(f"{url}/update_weights_from_disk", json=body, timeout=120).json()["success"]
        after = generate(url, PROMPT[:40], 8)
        assert after["weight_versions"] == [1] * 8 and after["output_ids"] != before["output_ids"]
