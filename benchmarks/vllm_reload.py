"""Does vLLM on a CPU score with new weights after ``reload_weights``, also where the output head is the embedding?

``VLLM_ENVIRONMENT/bin/python benchmarks/vllm_reload.py tied|untied [--json]`` makes small Llama checkpoints that differ
in one tensor each, loads them one after the other into one engine, and compares its log-probs of a prompt with
Transformers'. It needs nothing of this package, so that it runs in the environment of vLLM. Rows, in nats, for every
``CHANGE`` (``none``, ``embedding``, ``head``, ``mlp``):

- ``reload.HEAD.CHANGE``: mean |difference| to the new weights;
- ``reload.HEAD.CHANGE.old_head``: the same to the new weights with the head of the first ones. Where this is zero and
  the row before is not, the engine has kept the old head.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB, WIDTH, HEADS = 512, 256, 4
LIMIT = 0.001
"""Accepted difference in nats: the arithmetic of two libraries in fp32."""
CHANGES = {"tied": ("none", "embedding", "mlp"), "untied": ("none", "embedding", "head", "mlp")}
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1",
                "GLOO_SOCKET_IFNAME": "lo", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_LOGGING_LEVEL": "WARNING"}


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", choices=CHANGES)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ |= _ENVIRONMENT
    ids = torch.randint(3, VOCAB, (48,), generator=torch.Generator().manual_seed(3)).tolist()
    with tempfile.TemporaryDirectory() as directory:
        rows = _measure(arguments.head, ids, Path(directory))
    for row in rows:
        print(f"{row['name']:32} {row['value']:.6f} {row['unit']}")
    if arguments.json:
        print(json.dumps({"command": f"benchmarks/vllm_reload.py {arguments.head}", "rows": rows}))


def _measure(head: str, ids: list[int], root: Path) -> list[dict[str, Any]]:
    """Rows of one kind of head."""
    from vllm import LLM

    networks = {change: _network(head == "tied", change) for change in CHANGES[head]}
    for change, network in networks.items():
        network.save_pretrained(root / change)
    old_head_WD = networks["none"].lm_head.weight
    engine = LLM(str(root / "none"), dtype="float32", enforce_eager=True, max_model_len=128, skip_tokenizer_init=True,
                 enable_prefix_caching=False)
    rows: list[dict[str, Any]] = []
    for change, network in networks.items():
        engine.collective_rpc("reload_weights", kwargs={"weights_path": str(root / change)})
        scored = _score(engine, ids)
        new = _difference(scored, _reference(network, network.lm_head.weight, ids))
        rows += [{"name": f"reload.{head}.{change}", "value": new, "unit": "nats", "n": len(scored), "goal": LIMIT,
                  "met": new <= LIMIT},
                 {"name": f"reload.{head}.{change}.old_head", "unit": "nats", "n": len(scored),
                  "value": _difference(scored, _reference(network, old_head_WD, ids))}]
    return rows


def _network(is_tied: bool, change: str) -> Any:
    """The first weights with one tensor changed; an untied head begins as a copy of the embedding."""
    torch.manual_seed(0)
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=is_tied, initializer_range=0.05))
    weights = {"embedding": network.model.embed_tokens.weight, "head": network.lm_head.weight,
               "mlp": network.model.layers[0].mlp.down_proj.weight}
    with torch.no_grad():
        if not is_tied:
            weights["head"].copy_(weights["embedding"])
        if change != "none":
            weights[change].add_(0.02 * torch.randn(weights[change].shape, generator=torch.Generator().manual_seed(7)))
    return network.eval()


def _reference(network: Any, head_WD: Tensor, ids: list[int]) -> list[float]:
    """Log-probs of ``ids[1:]`` by Transformers, with another head."""
    with torch.no_grad():
        hidden_TD = network.model(torch.tensor([ids])).last_hidden_state[0]
        logprobs_TW = torch.log_softmax(hidden_TD @ head_WD.T, -1)
    return [float(logprobs_TW[t - 1, ids[t]]) for t in range(1, len(ids))]


def _score(engine: Any, ids: list[int]) -> list[float]:
    """Log-probs of ``ids[1:]`` by vLLM."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    answer = engine.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0]
    return [answer.prompt_logprobs[t][ids[t]].logprob for t in range(1, len(ids))]


def _difference(mine: list[float], theirs: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(mine, theirs, strict=True)) / len(mine)


if __name__ == "__main__":
    main()
