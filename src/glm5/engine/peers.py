"""The other implementations that ``glm5 bench engine`` runs: Transformers, and llama.cpp through its Python package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from glm5.errors import ConfigError


class Peer(Protocol):
    """Another implementation that has loaded the checkpoint."""

    name: str

    def prepare(self, prompts: list[list[int]], new: int) -> Callable[[], None]:
        """A call that computes ``prompts`` (of equal length) and decodes ``new`` greedy tokens for each."""


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


class LlamaCpp:
    """llama.cpp over a GGUF file that its own converter writes, in bf16."""

    name = "llama_cpp"

    def __init__(self, directory: Path, source: Path, threads: int) -> None:
        try:
            import llama_cpp
        except ImportError:
            raise ConfigError("bench engine: llama-cpp-python is missing; install glm5[bench]") from None
        self._library: Any = llama_cpp
        self._threads = threads
        self._path = _convert(directory, source)
        llama_cpp.llama_log_set(_silent(llama_cpp), None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(self._path).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise ConfigError(f"bench engine: llama.cpp cannot load {self._path}; use llama-cpp-python 0.3.36")

    def prepare(self, prompts: list[list[int]], new: int) -> Callable[[], None]:
        """See ``Peer``."""
        library, batch_size, length = self._library, len(prompts), len(prompts[0])
        params = library.llama_context_default_params()
        params.n_ctx = batch_size * (length + new + 8)
        params.n_batch = params.n_ubatch = min(2048, max(512, batch_size))
        params.n_seq_max = batch_size
        params.n_threads = params.n_threads_batch = self._threads
        context = library.llama_init_from_model(self._model, params)
        if not context:
            raise ConfigError("bench engine: llama.cpp gave no context; free some memory")
        batch = library.llama_batch_init(params.n_batch, 0, 1)

        def decode(tokens: list[tuple[int, int, int, bool]]) -> None:
            for row, (token, position, sequence, wants_logits) in enumerate(tokens):
                batch.token[row], batch.pos[row] = token, position
                batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, sequence, wants_logits
            batch.n_tokens = len(tokens)
            if library.llama_decode(context, batch):
                raise ConfigError("bench engine: llama.cpp failed to decode; free some memory")

        def best(row: int) -> int:
            logits = library.llama_get_logits_ith(context, row)
            return int(np.ctypeslib.as_array(logits, (4096,)).argmax())

        def run() -> None:
            library.llama_memory_clear(library.llama_get_memory(context), True)
            last = []
            for sequence, prompt in enumerate(prompts):
                for start in range(0, length, params.n_batch):
                    chunk = range(start, min(start + params.n_batch, length))
                    decode([(prompt[at], at, sequence, at == length - 1) for at in chunk])
                last.append(best(len(chunk) - 1))
            for step in range(new - 1):
                decode([(token, length + step, sequence, True) for sequence, token in enumerate(last)])
                last = [best(row) for row in range(batch_size)]

        return run


def _convert(directory: Path, source: Path) -> Path:
    """Run the converter of ``source`` over a copy of ``directory`` that has a vocabulary without words."""
    script = source / "convert_hf_to_gguf.py"
    if not script.exists():
        raise ConfigError(f"{script}: missing; give the source tree of llama.cpp, for example from the source "
                          "distribution of llama-cpp-python")
    target = directory.parent / "model.gguf"
    # The benchmark's model has ids but no tokenizer; the converter's own method for that is a vocabulary of none.
    program = (
        "import runpy, sys; sys.path.insert(0, sys.argv[1]); sys.path.insert(0, sys.argv[1] + '/gguf-py'); "
        "sys.argv = sys.argv[2:]; import gguf; "
        "module = runpy.run_path(sys.argv[0], run_name='converter'); "
        "base = module['ModelBase']; cls = base.from_model_architecture('GlmMoeDsaForCausalLM'); "
        "cls.set_vocab = lambda self: (self._set_vocab_none()); module['main']()"
    )
    command = [sys.executable, "-c", program, str(source), str(script), str(directory), "--outfile", str(target),
               "--outtype", "bf16"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode or not target.exists():
        last = (result.stderr.strip().splitlines() or ["(no output)"])[-1]
        raise ConfigError(f"bench engine: the converter of llama.cpp failed ({last}); use llama-cpp-python 0.3.36")
    return target


def _silent(library: Any) -> Any:
    @library.llama_log_callback
    def ignore(level: int, text: bytes, data: Any) -> None:
        return

    return ignore
