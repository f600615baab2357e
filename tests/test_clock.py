"""Time and memory of a run survive its process."""

import json
import os
import subprocess
import sys
import time

from glm5.clock import Clock, tree_rss_bytes


def test_seconds_of_a_step_add_up_over_attempts(tmp_path):
    for _ in range(2):
        with Clock(tmp_path / "clock.json").step("pretrain"):
            time.sleep(0.05)
    saved = json.loads((tmp_path / "clock.json").read_text())
    assert saved["attempts"] == 2
    assert 0.1 <= saved["seconds"]["pretrain"] < 2
    assert saved["peak_rss_bytes"] > 1_000_000


def test_nested_steps_count_in_both(tmp_path, monkeypatch):
    monkeypatch.setattr("glm5.clock._TICK_S", 0.001)
    clock = Clock(tmp_path / "clock.json")
    with clock.step("run"), clock.step("sft"):
        time.sleep(0.3)
    saved = json.loads((tmp_path / "clock.json").read_text())["seconds"]
    assert saved["run"] >= saved["sft"] >= 0.3


def test_memory_of_children_is_counted():
    child = subprocess.Popen([sys.executable, "-c", "x = bytearray(200_000_000); print('up', flush=True); input()"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        assert tree_rss_bytes(os.getpid()) - tree_rss_bytes(child.pid) > 1_000_000
        assert tree_rss_bytes(os.getpid()) > 200_000_000
    finally:
        child.kill()
        child.communicate(timeout=10)
