"""The launcher for Ray: what it refuses, and a whole run on a real cluster of three nodes."""

import dataclasses
import os
import sys

import pytest

from glm5.errors import ConfigError, ServiceError
from glm5.rl.launch.cluster import import_ray, train_on_cluster
from glm5.rl.operation import ClusterConfig, SupervisionConfig
from glm5.runlog import read_jsonl

from .coin_taskset import install
from .test_run import CONFIG

CLUSTER = dataclasses.replace(CONFIG, launch="ray", cluster=ClusterConfig(
    trainer={"trainer_node": 1}, engine={"engine_node": 1}, tasks={"task_node": 1}))


def test_without_ray_one_line_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"launch='ray' needs Ray; pip install 'glm5\[cluster\]'"):
        train_on_cluster(CLUSTER, tmp_path / "run")


def test_the_watchdog_is_for_one_machine():
    with pytest.raises(ConfigError, match=r'watch_trainer=true with launch="ray"'):
        dataclasses.replace(CLUSTER, supervision=SupervisionConfig(watch_trainer=True))


@pytest.mark.slow
def test_a_run_on_three_nodes_is_placed_by_resources(checkpoint, tmp_path, monkeypatch):
    """``pytest -m slow tests/rl/test_cluster.py``: raylets of three nodes, every service a process below its actor."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    site = tmp_path / "site"
    site.mkdir()
    install(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *sys.path]))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "120")  # a busy machine starts three nodes slowly
    ray = import_ray()
    small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"trainer_node": 1}, **small})
    try:
        nodes = {"trainer_node": cluster.head_node.node_id}
        for name in ("engine_node", "task_node"):
            nodes[name] = cluster.add_node(num_cpus=2, resources={name: 1},
                                           object_store_memory=small["object_store_memory"]).node_id
        ray.init(address=cluster.address, log_to_driver=False)
        final = train_on_cluster(dataclasses.replace(CLUSTER, init=str(checkpoint)), tmp_path / "run")
        assert final.name == "000003" and (final / "meta.json").is_file()
        events = read_jsonl(tmp_path / "run" / "events.jsonl")
        placed = {event["service"]: event["node"] for event in events if event["kind"] == "service_placed"}
        assert placed["engine"] == nodes["engine_node"] and placed["tasks-coin"] == nodes["task_node"]
        assert {"gateway", "orchestrator"} <= placed.keys()
        with pytest.raises(ServiceError, match="trainer: no node of the cluster has CPU=1, moon=1"):
            train_on_cluster(dataclasses.replace(CLUSTER, cluster=ClusterConfig(trainer={"moon": 1})), tmp_path / "no")
    finally:
        ray.shutdown()
        cluster.shutdown()
