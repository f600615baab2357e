"""Launch plans against the engines' own recipes and against hand-computed bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glm5.deploy import Wish, load_table, plan_deployment
from glm5.errors import ConfigError
from glm5.model.config import preset


def checkpoint(tmp_path: Path, name: str = "GLM-5-FP8", **extra: Any) -> Path:
    directory = tmp_path / name
    directory.mkdir(exist_ok=True)
    config = {**preset("glm-5").to_json(), **extra}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def fp8(tmp_path: Path) -> Path:
    return checkpoint(tmp_path, quantization_config={"quant_method": "fp8"})


@pytest.mark.parametrize(
    ("wish", "flags"),
    [
        (
            Wish(target="vllm", hardware="8xH200"),
            [
                "--tensor-parallel-size 8",
                "--tool-call-parser glm47",
                "--reasoning-parser glm45",
                "--speculative-config.method mtp",
                "--speculative-config.num_speculative_tokens 3",
            ],
        ),
        (
            Wish(target="vllm", hardware="8xh200", goal="throughput", mtp=False),
            ["--data-parallel-size 8", "--enable-expert-parallel"],
        ),
        (
            Wish(target="vllm", hardware="16xh200", goal="throughput"),
            ["--data-parallel-size 16", "--data-parallel-size-local 8", "--data-parallel-backend ray"],
        ),
        (
            Wish(target="sglang", hardware="16xH100"),
            [
                "--tp 16",
                "--speculative-algorithm EAGLE",
                "--nnodes 2",
                "--node-rank $NODE_RANK",
                "--mem-fraction-static 0.85",
            ],
        ),
        (
            Wish(target="sglang", hardware="8xb200", goal="throughput"),
            ["--tp 8", "--dp 8", "--enable-dp-attention", "--moe-runner-backend flashinfer_trtllm"],
        ),
        (
            Wish(target="sglang", hardware="4xb200", quantization="nvfp4"),
            ["--tp 4", "--quantization modelopt_fp4", "--kv-cache-dtype fp8_e4m3"],
        ),
        (
            Wish(target="ktransformers", hardware="8xrtx5090", host_memory_gb=1024),
            ["--kt-method FP8", "--tensor-parallel-size 8", "--kt-cpuinfer 96"],
        ),
        (
            Wish(target="xllm", hardware="16xa3", quantization="w8a8"),
            ["--nnodes=16", "--ep_size=16", "--num_speculative_tokens=3", "--communication_backend=hccl"],
        ),
        (Wish(target="xllm", hardware="16xa3", quantization="w8a8", goal="throughput"), ["--dp_size=2"]),
    ],
)
def test_the_published_recipes_come_out(tmp_path: Path, wish: Wish, flags: list[str]) -> None:
    plan = plan_deployment(fp8(tmp_path), wish)
    for flag in flags:
        assert f" {flag}" in plan.command
    assert ("speculative" in plan.command) == (wish.mtp and wish.quantization != "nvfp4" and "kt" not in plan.command)
    assert plan.cache_tokens >= wish.context and len(plan.sources) >= 2
    assert "{" not in plan.command.replace("${", "")


def test_bytes_are_those_computed_by_hand(tmp_path: Path) -> None:
    plan = plan_deployment(checkpoint(tmp_path), Wish(target="sglang", hardware="16xh200", mtp=False))
    assert plan.weights == pytest.approx(743_911_199_232 * 2 / 16)
    assert plan.cache == pytest.approx(141e9 * 0.85 - plan.weights)
    assert plan.cache_tokens == int(plan.cache // (78 * (576 * 2 + 132)))
    assert plan.weights + plan.cache + plan.reserve == pytest.approx(141e9)


def test_fp8_takes_a_byte_a_weight_and_its_scales(tmp_path: Path) -> None:
    plan = plan_deployment(fp8(tmp_path), Wish(target="vllm", hardware="8xh200", mtp=False))
    embeddings = 2 * 154880 * 6144
    expected = (743_911_199_232 - embeddings) * (1 + 4 / 16384) + embeddings * 2
    assert plan.weights == pytest.approx(expected / 8)


def test_offloaded_experts_fill_what_the_devices_leave(tmp_path: Path) -> None:
    small, large = (
        plan_deployment(fp8(tmp_path), Wish(target="ktransformers", hardware=name, host_memory_gb=1024))
        for name in ("8xrtx4090", "8xrtx5090")
    )

    def experts(command: str) -> int:
        return int(command.split("--kt-num-gpu-experts ")[1].split()[0])

    assert 0 < experts(small.command) < experts(large.command) < 256
    assert small.host == large.host == pytest.approx(75 * 256 * 3 * 6144 * 2048 * (1 + 4 / 16384))


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (Wish(target="vllm", hardware="8xh100"), "use 16 x h100"),
        (Wish(target="vllm", hardware="6xh200"), "cannot share the model evenly.*use 8 x h200"),
        (Wish(target="sglang", hardware="8xmi300x", quantization="bf16"), "use 16 x mi300x"),
        (Wish(target="ktransformers", hardware="8xh200", host_memory_gb=256), "host-memory-gb.*725 GB"),
        (Wish(target="ktransformers", hardware="8xh200", goal="throughput"), "one layout only"),
        (Wish(target="vllm", hardware="8xtpu"), "known devices: h100"),
        (Wish(target="vllm", hardware="h200"), "8xH200"),
        (Wish(target="triton", hardware="8xh200"), "vllm, sglang, ktransformers, xllm"),
        (Wish(target="vllm", hardware="8xmi355x"), "no recipe for fp8 weights on mi355x"),
        (Wish(target="vllm", hardware="8xh200", context=10**7), "longest is 202752"),
        (Wish(target="vllm", hardware="8xh200", goal="throughput", context=200_000), "use 16 x h200"),
    ],
)
def test_what_does_not_fit_is_one_line_that_says_what_does(tmp_path: Path, wish: Wish, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        plan_deployment(fp8(tmp_path), wish)
    assert "\n" not in str(caught.value)


def test_the_format_of_the_weights_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    nvfp4 = checkpoint(tmp_path, "a", quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    assert "modelopt_fp4" in plan_deployment(nvfp4, Wish(target="sglang", hardware="4xb200")).command
    unknown = checkpoint(tmp_path, "b", quantization_config={"quant_method": "awq"})
    with pytest.raises(ConfigError, match="awq"):
        plan_deployment(unknown, Wish(target="vllm", hardware="8xh200"))
    with pytest.raises(ConfigError, match="cannot be read"):
        plan_deployment(tmp_path / "none", Wish(target="vllm", hardware="8xh200"))


def test_every_entry_of_the_table_names_its_source_and_known_devices() -> None:
    table = load_table()
    for target in table.target.values():
        for entry in (target, *target.variant):
            assert entry.source.startswith("https://")
        assert bool(target.several_nodes) == bool(target.several_nodes_source)
        assert bool(target.throughput_nodes) == bool(target.throughput_nodes_source)
        assert {name for variant in target.variant for name in variant.hardware} <= set(table.hardware)
    assert all(hardware.source.startswith("https://") for hardware in table.hardware.values())
