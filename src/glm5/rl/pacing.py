"""Pacing: how many groups may start now, so that staleness stays bounded without throwing finished work away.

    may_start = (eta + step + 1) * B - (accepted + in_flight)

``B`` is the groups of one batch, ``step`` the optimizer steps done, ``accepted`` the groups that ever finished and
were not dropped later (trained, leased or ready), ``in_flight`` those still running. A dropped group leaves both
counts, so its place is refilled and the trainer never waits for a group that nobody may start. All terms come from the
ledger, so a restart recovers them. ``eta = 0`` is synchronous training: nothing starts until the step before is done.
"""

from __future__ import annotations


def may_start_groups(*, eta: int, step: int, batch_groups: int, accepted: int, in_flight: int) -> int:
    """Groups that may start now, never negative."""
    return max(0, (eta + step + 1) * batch_groups - (accepted + in_flight))

