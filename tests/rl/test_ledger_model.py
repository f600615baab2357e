"""Random histories of accepted, failed and stale groups, steps, checkpoints and crashes against a plain model.

The model is the lineage of the weights: the list of groups whose gradient they contain. Whatever happens, no group is
in it twice, nothing disappears without a reason, and pacing always lets the trainer get its next batch.
"""

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from glm5.rl.pacing import may_start_groups

from .factories import make_episode, open_ledger

BATCH, SIZE, ETA, TAU = 2, 3, 1, 2
END = st.sampled_from([("ok", 1.0), ("ok", 0.0), ("truncated", 0.0), ("infra_error", None), ("cancelled", None)])
ENDS = st.lists(END, min_size=SIZE, max_size=SIZE)


class LedgerHistory(RuleBasedStateMachine):
    @initialize()
    def start(self):
        self.directory = Path(tempfile.mkdtemp())
        self.ledger = open_ledger(self.directory, max_staleness=TAU)
        self.step, self.version, self.opened = 0, 0, 0
        self.running = {}
        self.lineage = []
        self.last_batch = 0
        self.saved = (0, 0, [])
        self.ledger.record_version(0, 0)

    def may_start(self):
        accepted, in_flight = self.ledger.accepted_and_in_flight()
        return may_start_groups(eta=ETA, step=self.step, batch_groups=BATCH, accepted=accepted, in_flight=in_flight)

    @precondition(lambda self: self.may_start() > 0)
    @rule()
    def open(self):
        index = self.ledger.next_task_index("calculator")
        assert index == self.opened
        self.ledger.open_group(f"g{index}", taskset="calculator", task_id=f"t{index}", task_index=index, size=SIZE)
        self.running[f"g{index}"] = self.version
        self.opened += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ends=ENDS)
    def close(self, data, ends):
        group_id = data.draw(st.sampled_from(sorted(self.running)))
        version = self.running.pop(group_id)
        reason = self.ledger.close_group(group_id, [
            [make_episode(group_id, slot, reward, outcome, version)] for slot, (outcome, reward) in enumerate(ends)])
        valid = [reward for _, reward in ends if reward is not None]
        if 2 * len(valid) <= SIZE:
            assert reason == "too_few_valid"

    @rule()
    def train(self):
        batch = self.ledger.lease(BATCH, self.step)
        if batch is None:
            return
        assert batch.batch_id > self.last_batch
        assert batch.episodes == BATCH * SIZE
        assert all(0 <= age <= TAU for age in batch.staleness.values())
        self.last_batch = batch.batch_id
        self.lineage += sorted({sample.group_id for sample in batch.samples})
        self.step += 1
        self.version = self.ledger.newest_version() + 1
        self.ledger.record_version(self.version, self.step)
        self.ledger.set_progress(self.step, self.version)

    @rule(crash_before_ack=st.booleans())
    def checkpoint(self, crash_before_ack):
        self.saved = (self.step, self.last_batch, list(self.lineage))
        if not crash_before_ack:
            self.ledger.ack(self.last_batch, self.step)
        else:
            self.crash()

    @rule()
    def crash(self):
        self.ledger.close()
        self.ledger = open_ledger(self.directory, max_staleness=TAU)
        self.ledger.drop_open_groups("interrupted")
        self.running.clear()
        self.step, self.last_batch, self.lineage = self.saved[0], self.saved[1], list(self.saved[2])
        self.ledger.recover(self.last_batch, self.step)
        self.version = self.ledger.newest_version() + 1
        self.ledger.record_version(self.version, self.step)
        self.ledger.set_progress(self.step, self.version)
        self.last_batch = self.saved[1]

    @rule()
    def a_batch_can_always_be_completed(self):
        """From any state, opening what pacing allows and ending it well gives the trainer its next batch."""
        for group_id in sorted(self.running):
            version = self.running.pop(group_id)
            self.ledger.close_group(group_id, [[make_episode(group_id, slot, float(slot == 0), version=version)]
                                               for slot in range(SIZE)])
        before = self.step
        for _ in range(2 * (ETA + 1) * BATCH):
            self.train()
            if self.step > before:
                return
            if self.may_start() > 0:
                self.open()
                (group_id, version), = self.running.items()
                del self.running[group_id]
                self.ledger.close_group(group_id, [[make_episode(group_id, slot, float(slot == 0), version=version)]
                                                   for slot in range(SIZE)])
        raise AssertionError("pacing starved the trainer")

    @invariant()
    def books_balance(self):
        assert self.ledger.check() == []
        assert len(self.lineage) == len(set(self.lineage))
        counts = self.ledger.counts()
        assert sum(counts.groups.values()) == self.opened
        assert counts.groups.get("open", 0) == len(self.running)
        assert sum(counts.dropped_groups.values()) == counts.groups.get("dropped", 0)
        held = counts.groups.get("acked", 0) + counts.groups.get("leased", 0)
        assert held == len(self.lineage)
        assert counts.groups.get("acked", 0) <= len(self.saved[2])

    def teardown(self):
        self.ledger.close()
        shutil.rmtree(self.directory)


LedgerHistory.TestCase.settings = settings(max_examples=20, stateful_step_count=25, deadline=None,
                                           suppress_health_check=list(HealthCheck))
TestLedgerHistory = LedgerHistory.TestCase
