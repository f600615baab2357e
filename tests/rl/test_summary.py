import pytest

from glm5.errors import ServiceError
from glm5.rl.summary import reward_curve, summary_rows
from glm5.runlog import RunLog

from .factories import add_group, open_ledger


def test_rows_come_from_the_ledger_and_the_metrics(tmp_path):
    ledger = open_ledger(tmp_path)
    ledger.record_version(0, 0)
    add_group(ledger, 0)
    add_group(ledger, 1, rewards=(1.0, 1.0))
    ledger.ack(ledger.lease(1, 1).batch_id, 2)
    ledger.close()
    log = RunLog(tmp_path)
    log.metrics(step=1, train_s=1.0, step_s=4.0, engine_busy_s=3.0, tokens=800, reward=0.25)
    log.metrics(step=1, train_s=1.0, step_s=4.0, engine_busy_s=4.0, tokens=800, reward=0.5)
    rows = {row["name"]: row["value"] for row in summary_rows(tmp_path)}
    zero = {name for name, value in rows.items() if value == 0}
    assert zero == {"episodes.agent_error", "episodes.cancelled", "episodes.infra_error", "episodes.retried",
                    "episodes.rollback", "episodes.stale", "episodes.too_few_valid", "episodes.truncated",
                    "episodes.unknown_version", "episodes.unmeasured", "episodes.waiting", "groups.dropped.interrupted",
                    "groups.dropped.rollback", "groups.dropped.run_ended", "groups.dropped.stale",
                    "groups.dropped.too_few_valid", "groups.dropped.unknown_version", "groups.reused",
                    "ledger.violations", "payload_bytes.file", "payload_bytes.removed"}
    assert rows.pop("payload_bytes.database") > 0
    assert {name: value for name, value in rows.items() if value} == {
        "busy.trainer": 0.25, "busy.engine": 0.875, "tokens_per_s.rl": 200.0, "episodes.trained": 4,
        "episodes.zero_variance": 2, "groups.acked": 1, "groups.dropped": 1, "groups.dropped.zero_variance": 1,
        "staleness.1": 4}
    assert reward_curve(tmp_path) == [(1, 0.5)]


def test_a_directory_without_a_ledger_is_one_line(tmp_path):
    with pytest.raises(ServiceError, match="missing; give the run directory"):
        summary_rows(tmp_path)
