"""Pacing: how many groups may start now, so that staleness stays bounded without throwing finished work away.

    wanted = (eta + step + 1) * B - accepted
    may_start = min(wanted / kept, wanted * oversample) - in_flight

``B`` is the new groups of one batch, ``step`` the optimizer steps done, ``accepted`` the groups that ever finished and
were not dropped later (trained, leased or ready), ``in_flight`` those still running. A dropped group leaves both
counts, so its place is refilled and the trainer never waits for a group that nobody may start. ``kept`` is the measured
share of the groups that are not dropped; with ``oversample = 1`` the formula is the usual
``wanted - in_flight``. What finishes beyond expectation counts as accepted, so that less starts later. All other terms
come from the ledger, so a restart recovers them. ``eta = 0`` is synchronous training: nothing starts until the step
before is done.
"""

from __future__ import annotations

import math

MEMORY = 32
"""Groups over which the share of kept ones is smoothed."""


def may_start_groups(*, eta: int, step: int, batch_groups: int, accepted: int, in_flight: int, kept: float = 1.0,
                     oversample: float = 1.0) -> int:
    """Groups that may start now, never negative."""
    wanted = max((eta + step + 1) * batch_groups - accepted, 0)
    return max(math.floor(wanted * min(1 / max(kept, 1e-6), oversample) + 1e-9) - in_flight, 0)


class KeptShare:
    """Share of the groups that ended and were kept, smoothed; 1 before any has ended, so that nothing overshoots."""

    def __init__(self) -> None:
        self.value = 1.0

    def record(self, kept: bool) -> None:
        """A group ended."""
        self.value += (kept - self.value) / MEMORY
