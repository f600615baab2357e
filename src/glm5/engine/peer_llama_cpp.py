"""llama.cpp beside the engine, through ``llama-cpp-python``: its own converter, its own kernels, the same checkpoint.

The benchmark's model has ids and no words, so the GGUF file is written with a vocabulary of none.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from glm5.errors import ConfigError

_GGML_F32 = 0
_NO_FLASH_ATTENTION = 0
_LARGEST_BATCH = 2048
_CONVERT = """
import runpy, sys
source, script, *arguments = sys.argv[1:]
sys.path[:0] = [source, source + "/gguf-py"]
sys.argv = [script, *arguments]
converter = runpy.run_path(script, run_name="converter")
model = converter["get_model_class"]("GlmMoeDsaForCausalLM")
model.set_vocab = model._set_vocab_none
converter["main"]()
"""


class LlamaCpp:
    """See ``peers.Peer``. Decoding goes on from the keys of the prompts, which stay in its cache between calls."""

    name = "llama_cpp"

    def __init__(self, directory: Path, source: Path, threads: int, kind: str = "bf16") -> None:
        """Convert ``directory`` to weights of ``kind`` (``bf16`` or ``f32``, which also takes fp32 keys) and load it.

        ``source`` is a source tree of llama.cpp. Raises ConfigError when a part is missing or fails.
        """
        try:
            import llama_cpp
        except (ImportError, FileNotFoundError, RuntimeError) as error:  # the package without its native library
            raise ConfigError(f"bench engine: llama-cpp-python cannot be imported ({error}); build it with "
                              "scripts/llama_cpp and add its site folder to PYTHONPATH") from None
        self._library: Any = llama_cpp
        self._threads, self._kind = threads, kind
        path = _convert(directory, source, kind)
        self._log = _silent(llama_cpp)  # the library keeps the pointer
        llama_cpp.llama_log_set(self._log, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise ConfigError(f"bench engine: llama.cpp cannot load {path}; use llama-cpp-python 0.3.36")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._context: Any = None
        self._batch: Any = llama_cpp.llama_batch_init(_LARGEST_BATCH, 0, 1)
        self._ids, self._positions, self._counts, self._wanted = (
            np.ctypeslib.as_array(field, (_LARGEST_BATCH,))
            for field in (self._batch.token, self._batch.pos, self._batch.n_seq_id, self._batch.logits)
        )
        self._counts[:] = 1

    def prepare(self, prompts: list[list[int]], new: int) -> Callable[[], None]:
        """See ``peers.Peer``."""
        length = len(prompts[0])
        self._open(len(prompts), length + new)
        rows, at = np.divmod(np.arange(len(prompts) * length), length)
        prompt = (np.array(prompts).ravel(), at, rows, at == length - 1)
        memory = self._library.llama_get_memory(self._context)

        def prefill() -> None:
            self._library.llama_memory_clear(memory, True)
            self._compute(*prompt)

        def decode() -> None:
            self._library.llama_memory_seq_rm(memory, -1, length - 1, -1)
            sequences, last = np.arange(len(prompts)), np.array([ids[-1] for ids in prompts])
            for step in range(new):
                place = np.full(len(prompts), length - 1 + step), sequences, np.ones(len(prompts), bool)
                last = self._compute(last, *place).argmax(-1)

        if new == 1:
            return prefill
        prefill()
        return decode

    def log_probs(self, ids: list[int]) -> np.ndarray:
        """fp64 [T, W]: the distribution after each of ``ids``."""
        self._open(1, len(ids))
        at = np.arange(len(ids))
        logits_TW = self._compute(np.array(ids), at, at * 0, at >= 0).astype(np.float64)
        logits_TW -= logits_TW.max(-1, keepdims=True)
        return logits_TW - np.log(np.exp(logits_TW).sum(-1, keepdims=True))

    def close(self) -> None:
        """Free the memory."""
        self._close_context()
        if self._model:
            self._library.llama_batch_free(self._batch)
            self._library.llama_model_free(self._model)
            self._model = None

    def _open(self, sequences: int, length: int) -> None:
        """A context for ``sequences`` of ``length`` tokens in place of the last one."""
        self._close_context()
        params = self._library.llama_context_default_params()
        params.n_ctx = sequences * (length + 8)
        params.n_batch = params.n_ubatch = _LARGEST_BATCH
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self._threads
        if self._kind == "f32":
            params.type_k = params.type_v = _GGML_F32
            params.flash_attn_type = _NO_FLASH_ATTENTION  # which rounds to fp16
        self._context = self._library.llama_init_from_model(self._model, params)
        if not self._context:
            raise ConfigError("bench engine: llama.cpp gave no context; free some memory")

    def _close_context(self) -> None:
        if self._context:
            self._library.llama_free(self._context)
            self._context = None

    def _compute(self, ids: np.ndarray, positions: np.ndarray, sequences: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """fp32 [rows, W]: logits of the tokens that are ``wanted``; the four arrays have one entry a token."""
        rows = []
        for start in range(0, len(ids), _LARGEST_BATCH):
            part = slice(start, start + _LARGEST_BATCH)
            count = self._batch.n_tokens = len(ids[part])
            self._ids[:count], self._positions[:count], self._wanted[:count] = ids[part], positions[part], wanted[part]
            for row, sequence in enumerate(sequences[part].tolist()):
                self._batch.seq_id[row][0] = sequence
            if self._library.llama_decode(self._context, self._batch):
                raise ConfigError("bench engine: llama.cpp failed to decode; free some memory")
            if count := int(wanted[part].sum()):
                logits = self._library.llama_get_logits(self._context)
                rows.append(np.ctypeslib.as_array(logits, (count, self._vocabulary)).copy())
        return rows[0] if len(rows) == 1 else np.concatenate(rows)


def _convert(directory: Path, source: Path, kind: str) -> Path:
    """The GGUF file that the converter of ``source`` writes for ``directory``. Raises ConfigError."""
    script = source / "convert_hf_to_gguf.py"
    if not script.exists():
        raise ConfigError(f"{script}: missing; give the source tree of llama.cpp, which scripts/llama_cpp fetches")
    target = directory.parent / f"model-{kind}.gguf"
    command = [sys.executable, "-c", _CONVERT, str(source), str(script), str(directory), "--outfile", str(target),
               "--outtype", kind]
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
