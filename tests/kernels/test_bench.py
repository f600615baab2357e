"""``glm5 bench attention`` at a tiny size: every row is there, and speed-ups are ratios of times of the same run."""

from __future__ import annotations

from glm5.kernels import bench


def test_every_row_is_there(monkeypatch):
    plan = bench.Plan(lengths=(40, 96), topks=(48, 16), queries=3, train_length=128, train_queries=5, rounds=1)
    monkeypatch.setattr(bench, "QUICK", plan)
    rows = {row["name"]: row for row in bench.bench_attention(quick=True, threads=1)}
    for kind in ("decode", "prefill"):
        for name in (f"{kind}.k{topk}.{length}" for topk in plan.topks for length in plan.lengths):
            assert {f"{name}.vs_torch_dense", f"{name}.vs_native_dense", f"{name}.ceiling_share"} <= rows.keys()
    assert {"ceiling.flops", "ceiling.bytes", "train.k16.128.vs_torch_dense", "prefill.k48.96.memory"} <= rows.keys()
    row = rows["prefill.k16.96.vs_torch_dense"]  # one round, so the ratio is that of the two times
    expected = rows["prefill.k16.96.ms.torch_dense"]["value"] / rows["prefill.k16.96.ms"]["value"]
    assert abs(row["value"] / expected - 1) < 2e-3 and row["met"] == (row["value"] >= row["goal"])
