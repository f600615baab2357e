"""A tree of turns → the token-exact sequences that are trained.

Every leaf gives one trajectory: the ids of its prompt and output. The ids along the way that the model sampled have
mask True on the first path that contains them and False on every later one, so that a turn shared by several leaves is
trained once. A turn whose prompt does not start with all ids of its parent begins a path of its own. Turns of a role
that is not trained keep mask False, and a path on which nothing is left to train gives no trajectory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from glm5.errors import GatewayError
from glm5.records import Trajectory, Turn, TurnRole


def build_trajectories(turns: Sequence[Turn], trained_roles: Collection[TurnRole] = ("main", "sub")
                       ) -> list[Trajectory]:
    """One trajectory per leaf, in the order of the leaves; ``turns`` oldest first, parents before children.

    Raises GatewayError when an extending turn does not start with its parent's ids.
    """
    by_id = {turn.turn_id: turn for turn in turns}
    extended = {turn.parent for turn in turns if turn.kind == "extend"}
    trained = {turn.turn_id for turn in turns if turn.role not in trained_roles}  # covered: never to be trained
    trajectories = []
    for leaf in turns:
        if leaf.turn_id in extended:
            continue
        path = _path(leaf, by_id)
        if all(turn.turn_id in trained for turn in path):
            continue
        trajectories.append(_linearise(path, trained))
        trained.update(turn.turn_id for turn in path)
    return trajectories


def trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    """Same as ``records.to_json``, without its deep copy of every number (it is called for every episode)."""
    return {"ids": trajectory.ids, "loss_mask": trajectory.loss_mask, "logprobs": trajectory.logprobs,
            "versions": trajectory.versions, "turn_ids": trajectory.turn_ids}


def _path(leaf: Turn, by_id: dict[str, Turn]) -> list[Turn]:
    path = [leaf]
    while path[-1].kind == "extend":
        turn = path[-1]
        parent = by_id.get(turn.parent or "")
        if parent is None:
            raise GatewayError(f"turn {turn.turn_id}: parent {turn.parent!r} is not recorded")
        length = len(parent.prompt_ids) + len(parent.output_ids)
        if turn.prompt_ids[:length] != parent.prompt_ids + parent.output_ids:
            raise GatewayError(f"turn {turn.turn_id}: its prompt does not start with the ids of {parent.turn_id}")
        path.append(parent)
    return path[::-1]


def _linearise(path: Sequence[Turn], trained: set[str]) -> Trajectory:
    leaf = path[-1]
    ids = leaf.prompt_ids + leaf.output_ids
    loss_mask, logprobs, versions = [False] * len(ids), [0.0] * len(ids), [-1] * len(ids)
    for turn in path:
        if turn.turn_id in trained:
            continue
        start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.output_ids)
        loss_mask[start:end] = [True] * (end - start)
        logprobs[start:end] = turn.logprobs
        versions[start:end] = turn.versions
    return Trajectory(ids=ids, loss_mask=loss_mask, logprobs=logprobs, versions=versions,
                      turn_ids=[turn.turn_id for turn in path])
