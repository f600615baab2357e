"""What the processes of ``test_parallel`` do: one set of four, started once, that forms one layout after the other."""

import dataclasses
import functools
import os
import shutil
import socket
import time
import traceback
from pathlib import Path

import torch

from glm5.errors import ServiceError
from glm5.model.moe import update_router_bias
from glm5.model.transformer import GlmMoeDsaForCausalLM
from glm5.train.config import DataConfig, OptimizerConfig, ParallelConfig, ScheduleConfig, StageConfig
from glm5.train.loop import compute_gradients
from glm5.train.losses import Objective
from glm5.train.parallel.layout import Layout, connect
from glm5.train.parallel.rows import part_of_batch
from glm5.train.parallel.shards import local_part
from glm5.train.parallel.spread import DividedExperts, Spread
from glm5.train.stages import run_stage

from .conftest import VOCABULARY, packed_batch, tiny_config

_DEADLINE_S = 300.0
Axes = functools.partial(ParallelConfig, timeout_s=_DEADLINE_S)
LAYOUTS = {
    "fsdp2": Axes(fsdp=2),
    "ep2": Axes(ep=2),
    "cp2": Axes(cp=2),
    "tp2": Axes(tp=2),
    "fsdp2_ep2": Axes(fsdp=2, ep=2),
    "cp2_tp2": Axes(cp=2, tp=2),
    "ep2_tp2_recomputed": Axes(ep=2, tp=2, activation_checkpointing=True),
}
PROCESSES = 4
JOBS = (*LAYOUTS, "run4", "move4", "dead", "silent")
OBJECTIVES = {
    "sparse": Objective(attention="sparse", main=True, indexer=True, mtp_steps=2, mtp_weight=0.3, balance_weight=0.01),
    "warmup": Objective(attention="dense", main=False, indexer=True, mtp_steps=1, mtp_weight=0.3, balance_weight=0.0),
}
OBJECTIVES["weightless"] = dataclasses.replace(OBJECTIVES["sparse"], indexer_weight=0.0)
OPTIMIZER = OptimizerConfig(lr=0.01, clip_norm=0.5)


def start_model(trains_main=True):
    """Three layers, the second of which shares the selection of the first."""
    config = tiny_config().replace(num_hidden_layers=3, indexer_types=("full", "shared", "full"))
    model = GlmMoeDsaForCausalLM(config, generator=torch.Generator().manual_seed(3))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains_main or ".indexer." in name)
    return model


def batch(step):
    """Four rows; the last one of the second step is padding alone."""
    made = packed_batch(rows=4, length=24, seed=step)
    if step == 1:
        made.documents_BT[3], made.loss_mask_BT[3] = -1, False
    return made


def train(layout, config, objective, micro_rows=0):
    """Two steps: numbers, whole gradients before clipping, whole weights and optimizer state afterwards."""
    model = start_model(OBJECTIVES[objective].main)
    spread = Spread(model, layout, config)
    found = {"steps": []}
    optimizer = spread.optimizer(OptimizerConfig(lr=0.01, clip_norm=0.0))
    for step in range(2):
        part = part_of_batch(batch(step), layout.row_part, layout.row_parts, layout.device)
        result, load_LE = compute_gradients(model, optimizer, OBJECTIVES[objective], part, micro_rows, spread)
        found["steps"].append({"losses": result.losses, "norms": (result.norms.main, result.norms.indexer),
                               "tokens": result.tokens, "load": load_LE})
        if step == 0:
            assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
            found["gradients"] = gradients(spread)
        optimizer.step(1.0)
        update_router_bias(model, load_LE, 0.01)
    whole = spread.whole_model()
    found["weights"] = {} if whole is None else dict(whole.state_dict())
    found["optimizer"] = optimizer.state_dict()
    return found


def gradients(spread):
    """Whole gradients by name, on the first process."""
    local = {name: local_part(parameter.grad).clone() for name, parameter in spread.model.named_parameters()
             if parameter.grad is not None}
    return local if spread._shards is None else spread._shards.bring_home(local)


def logits(layout, config):
    """Logits of the tokens of this process and where they belong."""
    spread = Spread(start_model(), layout, config)
    made = batch(0)
    with torch.no_grad():
        run = spread.bind(lambda model: model(made.ids_BT, made.positions_BT, made.documents_BT).logits)
        places = spread.model.part.local(torch.arange(24).expand(4, 24))[0]
        return {"logits": run(spread.model), "places": places}


def lonely_experts(layout):
    """Process 0 sends all its tokens to its own expert 1, process 1 has no token: outputs and gradients."""
    whole = start_model().model.layers[1].mlp.experts
    divided = DividedExperts(whole, layout.meshes.ep.get_group(), layout.rank) if layout.ep > 1 else whole
    tokens = 0 if layout.rank else 5
    x_MD = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))[:tokens].requires_grad_()
    weights_MA = torch.full((tokens, 2), 0.3, requires_grad=True)
    y_MD = divided(x_MD, torch.ones(tokens, 2, dtype=torch.int64), weights_MA)
    y_MD.square().sum().backward()
    return {"y": y_MD.detach(), "dx": x_MD.grad, "dweights": weights_MA.grad, "down": divided.down_proj.grad}


def stage(directory, config):
    """A short stage over the texts in ``directory``."""
    shape = {field: getattr(tiny_config(), field) for field in (
        "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "n_routed_experts", "index_n_heads", "index_head_dim", "index_topk")}
    return StageConfig(
        stage="dsa-sparse", name="s", tokenizer=str(directory / "tokenizer"), model={**shape, "vocab_size": VOCABULARY,
                                                                                         "initializer_range": 0.2},
        data=DataConfig(sources=(str(directory / "texts"),), held_out_fraction=0.3, held_out_rows=3), steps=4,
        batch_rows=4, length=24, mtp_steps=2, checkpoint_every=2, optimizer=OPTIMIZER, parallel=config, device="cpu",
        schedule=ScheduleConfig(kind="constant"), bias_rate=0.01)


def run(directory, name, config, start=None):
    """Run the stage as ``directory/name/s``, from a copy of checkpoint ``start`` when given."""
    run_dir = directory / name / "s"
    copy = None if start is None else run_dir / "checkpoints" / start.name
    if copy is not None and os.environ.get("RANK", "0") == "0":
        shutil.copytree(start, copy.with_name("copy"))
        copy.with_name("copy").rename(copy)
    elif copy is not None:
        wait_for(copy)
    return run_stage(stage(directory, config), run_dir)


def wait_for(path):
    deadline = time.monotonic() + _DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def lose(rank, how):
    """Process 1 leaves or falls silent while process 0 waits for it; what process 0 is told."""
    try:
        with connect(ParallelConfig(fsdp=2, timeout_s=2.0), "cpu") as layout:
            layout.wait()
            if rank == 0:
                layout.sum(torch.ones(3))
            elif how == "silent":
                time.sleep(4.0)
    except ServiceError as error:
        return str(error)
    return "nothing"


def _jobs(layout, config):
    yield "sparse", train(layout, config, "sparse")
    yield "logits", logits(layout, config)
    if layout.size == 1 or (layout.size == 2 and layout.ep == 2):
        yield "lonely", lonely_experts(layout)
    if layout.size == 2 and layout.ep == 2:
        yield "micro", train(layout, config, "sparse", micro_rows=1)
    if layout.fsdp == 2 and layout.size == 2:
        yield "weightless", train(layout, config, "weightless")
    if layout.size == 2 and layout.row_parts == 1:
        yield "warmup", train(layout, config, "warmup")


def alone():
    """What one process gives."""
    layout = Layout(torch.device("cpu"))
    return dict(_jobs(layout, ParallelConfig())) | {"warmup": train(layout, ParallelConfig(), "warmup")}


def process(rank, ports, directory):
    """Body of process ``rank``: everything that has room for it."""
    directory, ports = Path(directory), iter(ports)
    for name, config in LAYOUTS.items():
        _join(rank, max(config.fsdp, 1) * config.ep * config.cp * config.tp, next(ports), directory / name,
              lambda config=config: _spread_jobs(config))
    _join(rank, 4, next(ports), directory / "run4", lambda: {
        "path": run(directory, "four", Axes(ep=2, cp=2))})
    _join(rank, 4, next(ports), directory / "move4", lambda: {
        "path": run(directory, "one_to_four", Axes(fsdp=2, tp=2), directory / "one/s/checkpoints/000002")})
    for how in ("dead", "silent"):
        _join(rank, 2, next(ports), directory / how, lambda how=how: {"message": lose(rank, how)})


def _spread_jobs(config):
    with connect(config, "cpu") as layout:
        return dict(_jobs(layout, config))


def _join(rank, world, port, path, job):
    """Do ``job`` as process ``rank`` of ``world``, and save what it gives; wait for those who do when it is not one."""
    if rank >= world:
        wait_for(Path(f"{path}.0.pt"))
        return
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                   "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        found = job()
    except Exception:
        found = {"error": traceback.format_exc()}
    torch.save(found, f"{path}.{rank}.pt")


def free_ports(count):
    """Ports that nothing listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
