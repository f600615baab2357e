"""A disk that is really full: one line with the file and what to do, nothing half-written, and a way to go on."""

import asyncio
import json

import httpx
import pytest
from rl.factories import add_group, open_ledger
from train.conftest import tiny_model

from glm5.errors import CheckpointError, GatewayError, ServiceError
from glm5.gateway.sessions import SessionSettings
from glm5.gateway.store import Store
from glm5.rl.supervisor import ServiceSpec, Supervisor, poll_until
from glm5.runlog import RunLog, read_jsonl
from glm5.tokenizer.bpe import train_tokenizer
from glm5.train.checkpoint import TrainerState, latest_checkpoint, save_checkpoint
from glm5.train.config import OptimizerConfig
from glm5.train.optimizers import build_optimizer


def fill(disk):
    """Leave no free byte; gives the file to remove."""
    path = disk / "filler"
    with pytest.raises(OSError, match="No space left"), open(path, "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return path


def test_a_checkpoint_is_whole_or_absent(small_disk):
    model = tiny_model()
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.01))
    fill(small_disk)
    with pytest.raises(CheckpointError, match=r"000001: .*free") as caught:
        save_checkpoint(small_disk, TrainerState(step=1), model, optimizer.state_dict(), None)
    assert "\n" not in str(caught.value) and latest_checkpoint(small_disk) is None
    assert not [path for path in small_disk.rglob("*") if path.name not in ("filler", "checkpoints")]


def test_metrics_keep_whole_lines_and_go_on_when_there_is_space(small_disk):
    log = RunLog(small_disk)
    log.metrics(step=0, text="x" * 3000)
    filler = fill(small_disk)
    with pytest.raises(OSError, match=r"No space left.*metrics\.jsonl"):
        log.metrics(step=1, text="x" * 3000)
    filler.unlink()
    log.metrics(step=2)
    assert [record["step"] for record in read_jsonl(small_disk / "metrics.jsonl")] == [0, 2]
    assert all(json.loads(line) for line in (small_disk / "metrics.jsonl").read_text().splitlines())


def test_the_ledger_undoes_what_does_not_fit_and_goes_on(small_disk):
    ledger = open_ledger(small_disk)
    ledger.record_version(0, 0)
    add_group(ledger, 0)
    filler = fill(small_disk)
    with pytest.raises(ServiceError, match=r"ledger\.sqlite: .*(full|disk I/O).*free space") as caught:
        for index in range(1, 100):
            add_group(ledger, index)
    assert "\n" not in str(caught.value)
    filler.unlink()
    stored = sum(ledger.counts().groups.values())
    add_group(ledger, 200)
    assert sum(ledger.counts().groups.values()) == stored + 1 and ledger.check() == []
    ledger.close()


def test_the_store_of_turns_reports_a_full_disk_as_its_failure(small_disk):
    async def use(store):
        await store.create_session(SessionSettings(session_id="first", group_id="g"), "key")
        filler = fill(small_disk)
        with pytest.raises(GatewayError, match=r"turns\.sqlite: .*(full|disk I/O).*free space"):
            for number in range(1000):
                await store.create_session(SessionSettings(session_id=f"s{number}", group_id="g" * 500), "key")
        filler.unlink()
        assert await store.find_session("first") is not None

    store = Store(small_disk / "turns.sqlite")
    try:
        assert store.failure is None
        asyncio.run(use(store))
        assert isinstance(store.failure, GatewayError)
    finally:
        store.close()


def test_a_service_whose_disk_is_full_ends_the_run_with_its_line(small_disk, tmp_path):
    train_tokenizer(["one two three " * 20], 320).save(tmp_path / "tokenizer")
    events = []
    with Supervisor(tmp_path, lambda kind, **values: events.append(kind)) as supervisor:
        url = supervisor.add(ServiceSpec("gateway", "/health", lambda: [
            "gateway", "--engine", "http://127.0.0.1:9", "--tokenizer", str(tmp_path / "tokenizer"),
            "--store", str(small_disk / "turns.sqlite")]))
        supervisor.wait_until_ready()
        fill(small_disk)
        statuses = []
        with httpx.Client(trust_env=False) as http, pytest.raises(httpx.HTTPStatusError):
            for number in range(1000):
                answer = http.post(f"{url}/sessions", json={"session_id": f"s{number}", "group_id": "g" * 500})
                statuses.append(answer.status_code)
                answer.raise_for_status()
        assert statuses[-1] == 503
        with pytest.raises(ServiceError, match=r"gateway: .*turns\.sqlite: .*(full|disk I/O).*free space") as caught:
            poll_until(lambda: False, supervisor.tend, 60, "the failure")
    assert "\n" not in str(caught.value) and events == ["service_failed"]
