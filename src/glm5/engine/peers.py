"""The other implementations that ``glm5 bench engine`` runs; here Transformers, llama.cpp in ``peer_llama_cpp``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from glm5.errors import ConfigError


class Peer(Protocol):
    """Another implementation that has loaded the checkpoint."""

    name: str

    def prepare(self, prompts: list[list[int]], new: int) -> Callable[[], None]:
        """A call that decodes ``new`` greedy tokens behind each of ``prompts``, which have equal lengths.

        With ``new`` 1 the call computes the prompts; else it may have their keys from before.
        """

    def close(self) -> None:
        """Free what it holds."""


class Transformers:
    """``generate`` of Transformers, in bf16 with its default attention."""

    name = "transformers"

    def __init__(self, directory: Path) -> None:
        try:
            import transformers
        except ImportError:
            raise ConfigError("bench engine: transformers is missing; install glm5[bench]") from None
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()

    def prepare(self, prompts: list[list[int]], new: int) -> Callable[[], None]:
        """See ``Peer``."""
        ids_BT = torch.tensor(prompts)

        @torch.inference_mode()
        def run() -> None:
            self._model.generate(
                ids_BT,
                attention_mask=torch.ones_like(ids_BT),
                min_new_tokens=new,
                max_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )

        return run

    def close(self) -> None:
        """See ``Peer``."""
        del self._model
