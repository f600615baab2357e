"""How other engines serve a checkpoint of this family: the launch command and the memory that it takes.

Everything about an engine stands in ``deploy.toml`` with its source; here is what is computed: bytes of the weights and
of the cache, whether they fit, and how many devices they need. Nothing is launched.

Memory of one device, in bytes: ``fraction`` of it holds weights and cache. Tensor parallelism divides the weights and
repeats the cache (the latent of MLA has one head). Data parallelism divides the routed experts only and repeats the
rest, and each device has a cache of its own. Offloaded experts lie in the host's memory as far as they do not fit.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from glm5.config import build_config, read_toml
from glm5.errors import ConfigError
from glm5.model.config import ModelConfig
from glm5.model.counts import parameter_counts

Goal = Literal["latency", "throughput"]

_EXPERT_BYTES = {"bf16": 2.0, "fp8": 1 + 4 / 128**2, "w8a8": 1.0, "nvfp4": 0.5 + 1 / 16}
"""Bytes of one quantised weight with its scales: FP8 in blocks of 128 x 128, NVFP4 in groups of 16."""
_SHARDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_INDEX_BYTES = 132
"""Index key of one token and layer: 128 FP8 values and their scale."""
_LATENT_BYTES = {"bf16": 2.0, "fp8": 656 / 576}
"""Bytes of a cached latent value; FP8 keeps the rotary part in BF16 and a scale for each 128 values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One kind of device."""

    memory_gb: int
    """10^9 bytes of a device."""
    per_node: int
    """Devices of a machine."""
    source: str
    """Where the numbers stand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One quantisation on some kinds of devices."""

    quantization: Literal["bf16", "fp8", "nvfp4", "w8a8"]
    """Weights of the checkpoint."""
    hardware: tuple[str, ...]
    """Devices on which the engine's guide runs it."""
    fraction: float
    """Share of a device's memory for weights and cache."""
    source: str
    """Where the flags stand."""
    cache: Literal["bf16", "fp8"] = "bf16"
    """Latents of the cache."""
    has_mtp: bool = True
    """Whether the guide drafts with the MTP layer here."""
    flags: tuple[str, ...] = ()
    """Flags of this variant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One engine."""

    version: str
    """Version that the flags are for."""
    source: str
    """The engine's guide for the model."""
    command: tuple[str, ...]
    """Program and model."""
    flags: tuple[str, ...]
    """Flags of every variant."""
    latency: tuple[str, ...]
    """Layout that answers one user fastest."""
    variant: tuple[Variant, ...]
    """What it can run."""
    throughput: tuple[str, ...] = ()
    """Layout that serves most users; empty when there is only one layout."""
    mtp: tuple[str, ...] = ()
    """Flags of speculative decoding."""
    data_parallel: int = 0
    """Groups of the throughput layout that repeat all but the experts; 0 is one for each device."""
    several_nodes: tuple[str, ...] = ()
    """Further flags when one machine is not enough; empty: it must be enough."""
    several_nodes_source: str = ""
    """Where these stand."""
    throughput_nodes: tuple[str, ...] = ()
    """The same for the throughput layout, if they differ."""
    throughput_nodes_source: str = ""
    """Where these stand."""
    offloads_experts: bool = False
    """Whether routed experts may lie in the host's memory."""
    per_device: str = ""
    """Shell variable that counts the processes when each device has its own."""

    def nodes_flags(self, goal: Goal) -> tuple[tuple[str, ...], str]:
        """Flags for several machines, and their source."""
        if goal == "throughput" and self.throughput_nodes:
            return self.throughput_nodes, self.throughput_nodes_source
        return self.several_nodes, self.several_nodes_source


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """What ``deploy.toml`` holds."""

    hardware: dict[str, Hardware]
    """Kinds of devices by name."""
    target: dict[str, Target]
    """Engines by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What the user wants."""

    target: str
    hardware: str
    """``8xH200``."""
    context: int = 32768
    """Tokens that one request may have."""
    goal: Goal = "latency"
    mtp: bool = True
    quantization: str = ""
    """Plan for these weights instead of those in the directory."""
    host_memory_gb: int = 0
    """Memory of one machine, for offloaded experts."""
    threads: int = 96
    """CPU threads for offloaded experts."""
    numa_nodes: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A command and the memory of one device, in bytes."""

    command: str
    weights: float
    """Weights on one device."""
    cache: float
    """What the fraction leaves for the cache."""
    reserve: float
    """What the engine keeps for activations and graphs."""
    cache_tokens: int
    """Tokens that fit into the cache of one device."""
    host: float
    """Experts in the host's memory."""
    sources: tuple[str, ...] = field(default=())

    def rows(self) -> list[dict[str, Any]]:
        """The plan as result rows."""
        values = {"weights": self.weights, "cache": self.cache, "reserve": self.reserve, "host": self.host}
        rows = [{"name": f"memory.{name}", "value": round(value), "unit": "bytes"} for name, value in values.items()]
        return [*rows, {"name": "cache_tokens", "value": self.cache_tokens, "unit": "tokens"}]


def load_table() -> Table:
    """The table that the package ships."""
    with resources.as_file(resources.files("glm5").joinpath("deploy.toml")) as path:
        return build_config(Table, read_toml(path), "deploy.toml")


def plan_deployment(directory: Path, wish: Wish) -> Plan:
    """The launch of the checkpoint in ``directory``; its weights need not be there, ``config.json`` is enough.

    Raises ConfigError in one line when the engine, the device or the weights do not go together, or do not fit: then
    it says how many devices are needed.
    """
    table = load_table()
    count, name = _parse_hardware(wish.hardware, table)
    config = ModelConfig.from_json_file(directory / "config.json")
    if wish.target not in table.target:
        raise ConfigError(f"target {wish.target!r} is unknown; choose one of {', '.join(table.target)}")
    target, hardware = table.target[wish.target], table.hardware[name]
    quantization = wish.quantization or _quantization_of(directory)
    variant = _choose_variant(target, wish.target, name, quantization)
    if wish.goal == "throughput" and not target.throughput:
        raise ConfigError(f"{wish.target}: has one layout only; leave --goal out")
    if wish.context > config.max_position_embeddings:
        raise ConfigError(
            f"context={wish.context}: the model's longest is {config.max_position_embeddings}; lower --context"
        )
    sizes = _Sizes(config, variant, wish)

    def attempt(devices: int) -> Plan | None:
        return _fit(devices, hardware, target, variant, sizes, wish, directory)

    plan = attempt(count) if count in _allowed(target, hardware, config) else None
    if plan is None:
        raise ConfigError(_refusal(wish, count, name, variant, sizes, attempt, _allowed(target, hardware, config)))
    return plan


class _Sizes:
    """Bytes of the parts of a checkpoint."""

    def __init__(self, config: ModelConfig, variant: Variant, wish: Wish) -> None:
        counts = parameter_counts(config)
        with_mtp = wish.mtp and variant.has_mtp
        expert_layers = config.mlp_schedule.count("sparse") + (config.num_nextn_predict_layers if with_mtp else 0)
        expert = 3 * config.hidden_size * config.moe_intermediate_size * config.n_routed_experts
        embeddings = 2 * config.vocab_size * config.hidden_size
        per_weight = _EXPERT_BYTES[variant.quantization]
        dense = counts["with_mtp" if with_mtp else "total"] - expert_layers * expert - embeddings
        self.experts_layer = expert * per_weight
        """Routed experts of one layer."""
        self.experts = expert_layers * self.experts_layer
        # NVFP4 checkpoints quantise the experts only.
        self.rest = dense * (2.0 if variant.quantization == "nvfp4" else per_weight) + 2 * embeddings
        """Everything else; embeddings stay in BF16."""
        layers = config.num_hidden_layers + (config.num_nextn_predict_layers if with_mtp else 0)
        indexers = config.indexer_schedule.count("full") + (layers - config.num_hidden_layers)
        latent = (config.kv_lora_rank + config.qk_rope_head_dim) * _LATENT_BYTES[variant.cache]
        self.token = layers * latent + indexers * _INDEX_BYTES
        """Cache of one token."""
        self.num_experts = config.n_routed_experts
        self.expert_layers = expert_layers


def _fit(
    devices: int, hardware: Hardware, target: Target, variant: Variant, sizes: _Sizes, wish: Wish, directory: Path
) -> Plan | None:
    """The plan on ``devices``; None when weights and one request do not fit."""
    budget = hardware.memory_gb * 1e9 * variant.fraction
    wanted_cache = wish.context * sizes.token
    groups = 1 if wish.goal == "latency" else target.data_parallel or devices
    rest = sizes.rest * groups / devices
    host, gpu_experts, experts = 0.0, sizes.num_experts, sizes.experts / devices
    if target.offloads_experts:
        # Prefilling layer by layer takes the experts of one more layer (the guide of the engine).
        room = budget - wanted_cache - rest - sizes.experts_layer / devices
        one_of_each = sizes.experts / devices / sizes.num_experts
        gpu_experts = min(sizes.num_experts, math.floor(room / one_of_each))
        host = sizes.experts
        experts = max(gpu_experts, 0) * one_of_each + sizes.experts_layer / devices
        if gpu_experts < 0 or host > wish.host_memory_gb * 1e9 * 0.95:
            return None
    cache = budget - rest - experts
    if cache < wanted_cache:
        return None
    nodes = math.ceil(devices / hardware.per_node)
    values = {
        "model": shlex.quote(str(directory)),
        "name": shlex.quote(directory.resolve().name or "glm-5"),
        "devices": devices,
        "per_node": hardware.per_node,
        "nodes": nodes,
        "context": wish.context,
        "fraction": variant.fraction,
        "threads": wish.threads,
        "numa_nodes": wish.numa_nodes,
        "gpu_experts": gpu_experts,
    }
    return Plan(
        command=_command(target, variant, wish, values, nodes),
        weights=rest + experts,
        cache=cache,
        reserve=hardware.memory_gb * 1e9 - budget,
        cache_tokens=int(cache // sizes.token),
        host=host,
        sources=tuple(
            dict.fromkeys(
                [target.source, variant.source, *target.nodes_flags(wish.goal)[1:][: nodes - 1], hardware.source]
            )
        ),
    )


def _command(target: Target, variant: Variant, wish: Wish, values: dict[str, Any], nodes: int) -> str:
    layout = target.latency if wish.goal == "latency" else target.throughput
    parts = [*target.command, *layout, *variant.flags, *target.flags]
    parts += target.mtp if wish.mtp and variant.has_mtp else ()
    parts += target.nodes_flags(wish.goal)[0] if nodes > 1 else ()
    lines = [part.format_map(values) for part in parts]
    text = " \\\n  ".join(lines)
    if not target.per_device:
        return text
    variable, per_node = target.per_device, values["per_node"]
    first, last = (f"NODE_RANK*{per_node}", f"(NODE_RANK+1)*{per_node}") if nodes > 1 else (0, values["devices"])
    return f"for (( {variable}={first}; {variable}<{last}; {variable}++ )); do\n{text} &\ndone"


def _allowed(target: Target, hardware: Hardware, config: ModelConfig) -> list[int]:
    """Device counts that divide heads and experts, and fill machines when there are several."""

    def fits(devices: int) -> bool:
        divides = config.num_attention_heads % devices == 0 and config.n_routed_experts % devices == 0
        is_one_machine = devices <= hardware.per_node
        return divides and (is_one_machine or (bool(target.several_nodes) and devices % hardware.per_node == 0))

    return [devices for devices in _SHARDS if fits(devices)]


def _refusal(
    wish: Wish,
    count: int,
    name: str,
    variant: Variant,
    sizes: _Sizes,
    attempt: Callable[[int], Plan | None],
    allowed: list[int],
) -> str:
    """One line: what does not fit and what would."""
    enough = next((devices for devices in allowed if attempt(devices) is not None), None)
    advice = (
        f"use {enough} x {name}"
        if enough is not None
        else f"no number of them does; give --host-memory-gb (the experts take {sizes.experts / 1e9:.0f} GB)"
        if wish.target == "ktransformers"
        else "no number of them does; choose other hardware, fewer bits or a shorter --context"
    )
    weights_gb = (sizes.experts + sizes.rest) / 1e9
    need = f"{weights_gb:.0f} GB of {variant.quantization} weights and {wish.context} tokens of cache"
    if count not in allowed:
        return f"{count} x {name}: {count} devices cannot share the model evenly ({need}); {advice}"
    return f"{count} x {name}: {need} do not fit; {advice}"


def _parse_hardware(text: str, table: Table) -> tuple[int, str]:
    count, _, name = text.lower().partition("x")
    if not count.isdigit() or int(count) < 1 or name not in table.hardware:
        raise ConfigError(f"hardware {text!r}: expected for example 8xH200; known devices: {', '.join(table.hardware)}")
    return int(count), name


def _choose_variant(target: Target, target_name: str, hardware: str, quantization: str) -> Variant:
    for variant in target.variant:
        if variant.quantization == quantization and hardware in variant.hardware:
            return variant
    known = ", ".join(f"{variant.quantization} on {'/'.join(variant.hardware)}" for variant in target.variant)
    raise ConfigError(f"{target_name}: no recipe for {quantization} weights on {hardware}; it has {known}")


def _quantization_of(directory: Path) -> str:
    """Format of the weights by ``quantization_config`` of ``config.json``."""
    data = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    found = data.get("quantization_config") or {}
    method, algorithm = str(found.get("quant_method", "")), str(found.get("quant_algo", ""))
    if not found:
        return "w8a8" if (directory / "quant_model_description.json").exists() else "bf16"
    if method == "fp8":
        return "fp8"
    if "NVFP4" in algorithm.upper():
        return "nvfp4"
    raise ConfigError(
        f"{directory}/config.json: quantization {method or algorithm!r} has no recipe; give --quantization"
    )
