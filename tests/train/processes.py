"""What the processes of ``test_parallel`` do: one set of four, started once, that forms one layout after the other."""

import os
import socket
import traceback
from pathlib import Path

import torch

from glm5.model.moe import update_router_bias
from glm5.model.transformer import GlmMoeDsaForCausalLM
from glm5.train.config import OptimizerConfig, ParallelConfig
from glm5.train.loop import compute_gradients
from glm5.train.losses import Objective
from glm5.train.parallel.layout import Layout, connect
from glm5.train.parallel.rows import part_of_batch
from glm5.train.parallel.shards import local_part
from glm5.train.parallel.spread import Spread

from .conftest import packed_batch, tiny_config

LAYOUTS = {
    "fsdp2": ParallelConfig(fsdp=2),
    "ep2": ParallelConfig(ep=2),
    "cp2": ParallelConfig(cp=2),
    "tp2": ParallelConfig(tp=2),
    "fsdp2_ep2": ParallelConfig(fsdp=2, ep=2),
    "cp2_tp2": ParallelConfig(cp=2, tp=2),
    "ep4": ParallelConfig(ep=4),
    "ep2_cp2_recomputed": ParallelConfig(ep=2, cp=2, activation_checkpointing=True),
    "fsdp2_tp2_recomputed": ParallelConfig(fsdp=2, tp=2, activation_checkpointing=True),
}
PROCESSES = 4
OBJECTIVES = {
    "sparse": Objective(attention="sparse", main=True, indexer=True, mtp_steps=2, mtp_weight=0.3, balance_weight=0.01),
    "warmup": Objective(attention="dense", main=False, indexer=True, mtp_steps=1, mtp_weight=0.3, balance_weight=0.0),
}
OPTIMIZER = OptimizerConfig(lr=0.01, clip_norm=0.5)
_DEADLINE_S = 60.0


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
    for step in range(2):
        optimizer = spread.optimizer(OptimizerConfig(lr=0.01, clip_norm=0.0)) if step == 0 else optimizer
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
    found = {}
    for name, parameter in spread.model.named_parameters():
        if parameter.grad is None:
            continue
        whole = spread._shards.collect({name: local_part(parameter.grad)}, {name: 0}) if spread._shards else {
            name: parameter.grad.clone()}
        found |= whole
    return found


def logits(layout, config):
    """Logits of the tokens of this process and where they belong."""
    spread = Spread(start_model(), layout, config)
    made = batch(0)
    with torch.no_grad():
        run = spread.bind(lambda model: model(made.ids_BT, made.positions_BT, made.documents_BT).logits)
        places = spread.model.part.local(torch.arange(24).expand(4, 24))[0]
        return {"logits": run(spread.model), "places": places}


def _jobs(layout, config):
    yield "sparse", train(layout, config, "sparse")
    yield "logits", logits(layout, config)
    if layout.size == 2:
        yield "micro", train(layout, config, "sparse", micro_rows=1)
        yield "warmup", train(layout, config, "warmup")


def alone():
    """What one process gives."""
    return dict(_jobs(Layout(torch.device("cpu"), fsdp=1), ParallelConfig())) | {
        "warmup": train(Layout(torch.device("cpu")), ParallelConfig(), "warmup")}


def process(rank, ports, directory):
    """Body of process ``rank``: every layout that has room for it."""
    torch.set_num_threads(1)
    for (name, config), port in zip(LAYOUTS.items(), ports, strict=True):
        world = max(config.fsdp, 1) * config.ep * config.cp * config.tp
        if rank >= world:
            continue
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                       "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            with connect(config, "cpu") as layout:
                found = dict(_jobs(layout, config))
        except Exception:
            found = {"error": traceback.format_exc()}
        torch.save(found, Path(directory) / f"{name}.{rank}.pt")


def free_ports(count):
    """Ports that nothing listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
