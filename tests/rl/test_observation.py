"""Timeline, Prometheus page, writers and transcripts of a run, from hand-written records."""

import builtins
import json
import sys
import types

import httpx
import pytest

from glm5.errors import ConfigError, ServiceError
from glm5.records import Sample, Trajectory
from glm5.rl.exporter import exporting, render
from glm5.rl.ledger import Ledger
from glm5.rl.spans import Track
from glm5.rl.timeline import read_spans, wait_rows, write_trace
from glm5.rl.transcripts import choose, read_transcripts, write_transcripts
from glm5.rl.writers import open_writers
from glm5.runlog import read_jsonl
from glm5.tokenizer.bpe import load_tokenizer

from .factories import make_episode


def write_records(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def run_dir(tmp_path):
    """Ten seconds of a run: the trainer waits 3 + 1 s and trains 6 s, one push of 0.5 s, the engine is down for 2 s."""
    def span(at, component, name, seconds, waits_for=""):
        return {"time": at, "kind": "span", "component": component, "name": name, "seconds": seconds,
                "waits_for": waits_for}

    write_records(tmp_path / "events.jsonl", [
        span(103.0, "trainer", "wait for a batch", 3.0, "episodes"), span(109.0, "trainer", "train", 6.0),
        span(110.0, "trainer", "wait for a batch", 1.0, "episodes"),
        {"time": 104.0, "kind": "service_died", "service": "engine", "why": "exited with -9", "deaths": 1},
        {"time": 105.0, "kind": "service_died", "service": "engine", "why": "exited with -9", "deaths": 2},
        {"time": 106.0, "kind": "service_restarted", "service": "engine", "start_s": 1.0},
        {"time": 107.0, "kind": "weights_pushed", "url": "x", "version": 2, "push_s": 0.5}])
    write_records(tmp_path / "metrics.jsonl", [
        {"time": 105.0, "step": 1, "step_s": 5.0, "engine_busy_s": 4.0, "k3": 0.1},
        {"time": 110.0, "step": 2, "step_s": 5.0, "engine_busy_s": 2.0, "k3": 0.25, "k3.staleness_1": 0.5,
         "reward.shell": 0.75, "update_applied": True, "bad": float("nan")}])
    return tmp_path


def test_waits_and_work_add_up_by_component(run_dir):
    rows = {row["name"]: (row["value"], row["n"], row["ratio"]) for row in wait_rows(run_dir)}
    assert rows == {
        "busy.trainer.train": (6.0, 1, 0.6), "wait.trainer.episodes": (4.0, 2, 0.4), "busy.engine.down": (2.0, 1, 1.0),
        "busy.weights.push": (0.5, 1, 1.0), "busy.engine.steps": (6.0, 2, 0.6), "idle.engine.steps": (4.0, 2, 0.4)}


def test_the_trace_places_every_span(run_dir):
    assert [(span.component, span.start) for span in read_spans(run_dir)] == [
        ("trainer", 100.0), ("trainer", 103.0), ("engine", 104.0), ("weights", 106.5), ("trainer", 109.0)]
    ledger = Ledger(run_dir / "ledger.sqlite", max_staleness=1, pad_groups=False)
    ledger.close()
    assert write_trace(run_dir, run_dir / "trace.json") == 5
    events = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    assert {"ph": "X", "pid": 1, "tid": 0, "ts": 100_000_000, "dur": 3_000_000, "name": "waits for episodes",
            "cat": "wait"} in events
    assert {"ph": "C", "pid": 1, "ts": 100_000_000, "name": "engine busy %", "args": {"value": 80.0}} in events
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["trainer", "engine", "weights"]


def test_a_directory_without_events_is_one_line(tmp_path):
    with pytest.raises(ServiceError, match=r"events\.jsonl: missing"):
        wait_rows(tmp_path)


def test_a_track_records_states_that_last_and_spans_that_fail(monkeypatch):
    now, found = [0.0], []
    monkeypatch.setattr("glm5.rl.spans.time.monotonic", lambda: now[0])
    track = Track(lambda kind, **values: found.append((kind, values["name"], values["seconds"], values["waits_for"])),
                  "orchestrator")
    for at, name, other in ((0.0, "pacing", "trainer"), (1.0, "pacing", "trainer"), (2.0, "full", "episodes"),
                            (2.1, "pacing", "trainer"), (3.0, "idle", "")):
        now[0] = at
        track.enter(name, other)
    now[0] = 4.0
    track.end()
    with pytest.raises(KeyError), track.span("work"):
        now[0] = 4.5
        raise KeyError
    assert found == [("span", "pacing", 2.0, "trainer"), ("span", "full", 1.0, "episodes"), ("span", "idle", 1.0, ""),
                     ("span", "work", 0.5, "")]


def test_the_page_for_prometheus_has_the_newest_numbers(run_dir):
    page = render(run_dir, lambda: {"engine": 0.5})
    for line in ("glm5_rl_k3 0.25", 'glm5_rl_k3{staleness="1"} 0.5', 'glm5_rl_reward{name="shell"} 0.75',
                 'glm5_rl_events_total{kind="service_died"} 2', 'glm5_rl_heartbeat_age_seconds{component="engine"} 0.5',
                 "# TYPE glm5_rl_events_total counter", "glm5_rl_step 2"):
        assert line in page.splitlines(), line
    assert "nan" not in page and "update_applied" not in page and "span" not in page
    assert page.count("# TYPE glm5_rl_k3 ") == 1
    with exporting(run_dir, "127.0.0.1", 0) as port:
        assert "glm5_rl_k3 0.25" in httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5).text
        assert httpx.get(f"http://127.0.0.1:{port}/", timeout=5).status_code == 404
        with pytest.raises(ServiceError, match="choose another port"), exporting(run_dir, "127.0.0.1", port):
            pass
    assert render(run_dir / "nothing") == "\n"


def test_writers_get_the_finite_numbers_of_a_step(tmp_path, monkeypatch):
    calls = []
    summary = types.SimpleNamespace(add_scalar=lambda *call: calls.append(call),
                                    close=lambda: calls.append("closed"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard",
                        types.SimpleNamespace(SummaryWriter=lambda path: summary))
    run = types.SimpleNamespace(log=lambda values, step: calls.append((step, values)),
                                finish=lambda: calls.append("end"))
    started = []
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(
        init=lambda **values: started.append(values) or run))
    for _ in range(2):
        with open_writers(["tensorboard", "wandb"], tmp_path, "small") as writers:
            writers.write(3, {"reward.shell": 0.5, "note": "text", "loss": float("inf"), "applied": True})
    assert calls[:2] == [("reward/shell", 0.5, 3), (3, {"reward.shell": 0.5})]
    assert set(calls[2:4]) == {"closed", "end"}
    assert started[0]["mode"] == "offline" and started[0]["id"] == started[1]["id"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_writer_that_is_not_installed_is_one_line(tmp_path, monkeypatch, name):
    real = builtins.__import__

    def refuse(module, *rest, **named):
        if name in module:
            raise ImportError(module)
        return real(module, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=rf"{name} is not installed; pip install 'glm5\[{name}\]'"), open_writers(
            [name], tmp_path, "small"):
        pass


def sample(episode_id, advantage):
    return Sample(sample_id=f"{episode_id}/0", episode_id=episode_id, group_id="g", taskset="coin", advantage=advantage,
                  trajectory=Trajectory(ids=[1], loss_mask=[True], logprobs=[0.0], versions=[1]), weight=1.0)


def test_transcripts_are_of_the_best_and_the_worst():
    samples = [sample("a", 0.1), sample("b", -0.9), sample("c", 0.8), sample("d", -0.2), sample("c", 0.8)]
    assert [one.episode_id for one in choose(samples, 3)] == ["c", "b", "a"]
    assert choose(samples, 0) == [] and choose([], 2) == []
    assert len(choose(samples, 99)) == 4


def test_transcripts_of_a_step_can_be_read_again(tmp_path, checkpoint):
    ledger = Ledger(tmp_path / "ledger.sqlite", max_staleness=1, pad_groups=False)
    ledger.record_version(1, 0)
    ledger.set_progress(0, 1)
    ledger.open_group("g", taskset="coin", task_id="t", task_index=0, size=2)
    ledger.close_group("g", [[make_episode("g", 0, 1.0, version=1)], [make_episode("g", 1, 0.0, version=1)]])
    batch = ledger.lease(1, 0)
    ledger.close()
    write_transcripts(tmp_path, 1, batch, 2, load_tokenizer(checkpoint))
    write_transcripts(tmp_path, 2, batch, 1, load_tokenizer(checkpoint))
    assert [(item["step"], item["reward"], item["advantage"]) for item in read_transcripts(tmp_path, 1)] == [
        (1, 1.0, 0.5), (1, 0.0, -0.5)]
    (newest,) = read_transcripts(tmp_path)
    assert newest["step"] == 2 and "⟦" in newest["text"]
    assert list(read_transcripts(tmp_path, taskset="other")) == []
    with pytest.raises(ServiceError, match="no transcripts of step 9"):
        list(read_transcripts(tmp_path, 9))
    assert read_jsonl(tmp_path / "transcripts" / "000001.jsonl")
