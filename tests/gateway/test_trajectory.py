"""Trees of turns → token-exact sequences, by hand."""

from dataclasses import replace

import pytest

from glm5.errors import GatewayError
from glm5.gateway.trajectory import build_trajectories, trajectory_to_json
from glm5.records import Turn, to_json


def turn(turn_id, parent, kind, prompt_ids, output_ids, version=1):
    return Turn(turn_id=turn_id, session_id="s", parent=parent, kind=kind, prompt_ids=prompt_ids, output_ids=output_ids,
                logprobs=[-token / 100 for token in output_ids], versions=[version] * len(output_ids),
                finish_reason="stop")


def test_a_chain_gives_one_trajectory_with_only_sampled_ids_trained():
    first = turn("a", None, "root", [1, 2], [10, 11], version=3)
    second = turn("b", "a", "extend", [1, 2, 10, 11, 5], [12], version=4)
    (trajectory,) = build_trajectories([first, second])
    assert trajectory.ids == [1, 2, 10, 11, 5, 12]
    assert trajectory.loss_mask == [False, False, True, True, False, True]
    assert trajectory.logprobs == [0.0, 0.0, -0.1, -0.11, 0.0, -0.12]
    assert trajectory.versions == [-1, -1, 3, 3, -1, 4]
    assert trajectory.turn_ids == ["a", "b"]


def test_a_turn_shared_by_two_leaves_is_trained_once():
    shared = turn("a", None, "root", [1], [10])
    left, right = turn("b", "a", "extend", [1, 10, 5], [11]), turn("c", "a", "extend", [1, 10, 6], [12])
    first, second = build_trajectories([shared, left, right])
    assert (first.ids, first.loss_mask) == ([1, 10, 5, 11], [False, True, False, True])
    assert (second.ids, second.loss_mask) == ([1, 10, 6, 12], [False, False, False, True])
    assert second.logprobs[1] == 0.0 and second.versions[1] == -1
    assert second.turn_ids == ["a", "c"]


def test_every_sampled_id_is_trained_exactly_once_in_a_deeper_tree():
    turns = [turn("a", None, "root", [1], [10]), turn("b", "a", "extend", [1, 10, 5], [11]),
             turn("c", "b", "extend", [1, 10, 5, 11, 6], [12]), turn("d", "b", "extend", [1, 10, 5, 11, 7], [13]),
             turn("e", "a", "extend", [1, 10, 8], [14]), turn("f", "d", "rewrite", [1, 10, 5, 11, 7, 99], [15])]
    trajectories = build_trajectories(turns)
    pairs = [pair for item in trajectories for pair in zip(item.ids, item.loss_mask, strict=True)]
    trained = sorted(token for token, is_trained in pairs if is_trained)
    assert trained == [10, 11, 12, 13, 14, 15]
    assert len(trajectories) == 4


def test_a_rewritten_history_starts_a_path_of_its_own_and_leaves_its_parent_a_leaf():
    first = turn("a", None, "root", [1], [10, 11])
    second = turn("b", "a", "rewrite", [1, 10, 99, 5], [12])
    one, two = build_trajectories([first, second])
    assert (one.ids, one.loss_mask) == ([1, 10, 11], [False, True, True])
    assert (two.ids, two.loss_mask) == ([1, 10, 99, 5, 12], [False, False, False, False, True])
    assert two.turn_ids == ["b"]


def test_an_extension_that_does_not_extend_is_refused():
    with pytest.raises(GatewayError, match="turn b: its prompt does not start with the ids of a"):
        build_trajectories([turn("a", None, "root", [1], [10]), turn("b", "a", "extend", [1, 11, 5], [12])])
    with pytest.raises(GatewayError, match="parent 'z' is not recorded"):
        build_trajectories([turn("b", "z", "extend", [1, 11, 5], [12])])


def test_json_is_that_of_the_records():
    (trajectory,) = build_trajectories([turn("a", None, "root", [1], [10])])
    assert trajectory_to_json(trajectory) == to_json(trajectory)


def test_roles_that_are_not_trained_give_context_but_no_trajectory():
    main, aux = turn("a", None, "root", [1], [10]), replace(turn("b", None, "root", [2], [11]), role="aux")
    on_aux = turn("c", "b", "extend", [2, 11, 3], [12])
    (trajectory,) = build_trajectories([main, aux])
    assert trajectory.turn_ids == ["a"]
    assert len(build_trajectories([main, aux, on_aux])) == 2
    second = build_trajectories([main, aux, on_aux])[1]
    assert (second.ids, second.loss_mask) == ([2, 11, 3, 12], [False, False, False, True])
    assert build_trajectories([main, aux], ("aux",))[0].ids == [2, 11] and build_trajectories([aux]) == []
