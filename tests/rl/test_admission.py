import pytest

from glm5.records import Episode, Trajectory
from glm5.rl.admission import admit, group_samples, is_measured, sampled_versions, turn_rewards

from .factories import make_episode, make_trajectory


def episodes(rewards, outcomes=None):
    outcomes = outcomes or ["ok"] * len(rewards)
    return [make_episode("g", slot, reward, outcome)
            for slot, (reward, outcome) in enumerate(zip(rewards, outcomes, strict=True))]


def fresh(episode):
    return False


def test_exactly_half_valid_is_dropped_and_one_more_is_kept():
    half = episodes([1.0, 0.0, None, None], ["ok", "ok", "infra_error", "cancelled"])
    assert admit(half, fresh, pad=True).reason == "too_few_valid"
    more = episodes([1.0, 0.0, 0.0, None], ["ok", "agent_error", "truncated", "infra_error"])
    assert admit(more, fresh, pad=True).multiplicities == [2, 1, 1, 0]
    assert admit(more, fresh, pad=False).multiplicities == [1, 1, 1, 0]


def test_a_missing_reward_is_excluded_not_zero():
    verdict = admit(episodes([1.0, 1.0, None]), fresh, pad=False)
    assert (verdict.reason, verdict.multiplicities) == ("zero_variance", [0, 0, 0])


def test_equal_rewards_are_kept_when_asked_for():
    verdict = admit(episodes([1.0, 1.0, None]), fresh, pad=True, keep_equal=True)
    assert (verdict.reason, verdict.multiplicities) == ("", [2, 1, 0])


def test_a_group_that_only_staleness_made_short_is_dropped_as_stale():
    verdict = admit(episodes([1.0, 0.0, 1.0]), lambda episode: episode.episode_id != "g-s0a0", pad=True)
    assert verdict.reason == "stale"


def test_an_episode_without_sampled_tokens_is_not_measured():
    assert not is_measured(make_episode("g", 0, sampled=0))
    assert is_measured(make_episode("g", 0))


def test_versions_of_prompt_tokens_are_ignored():
    assert sampled_versions(make_episode("g", 0, version=7)) == {7}


def test_padding_enters_the_mean_and_the_weight():
    group = episodes([1.0, 0.0, 0.0, None], ["ok", "ok", "ok", "infra_error"])
    samples = group_samples(group, [2, 1, 1, 0])
    assert [sample.advantage for sample in samples] == [0.5, -0.5, -0.5]
    assert [sample.weight for sample in samples] == [2.0, 1.0, 1.0]


def test_siblings_share_the_weight_of_one_episode_by_their_sampled_tokens():
    branched = Episode(episode_id="e", group_id="g", task_id="t", taskset="calculator", outcome="ok", reward=1.0,
                       trajectories=[make_trajectory(3), make_trajectory(1), make_trajectory(0)])
    samples = group_samples([branched, make_episode("g", 1, 0.0)], [1, 1])
    assert [sample.sample_id for sample in samples] == ["e/0", "e/1", "g-s1a0/0"]
    assert [sample.weight for sample in samples] == pytest.approx([0.75, 0.25, 1.0])
    assert samples[0].advantage == samples[1].advantage == 0.5


def test_tokens_after_the_last_sampled_one_are_cut():
    tail = Trajectory(ids=[1, 2, 3, 4], loss_mask=[False, True, False, False], logprobs=[0.0, -1.0, 0.0, 0.0],
                      versions=[-1, 3, -1, -1])
    episode = Episode(episode_id="e", group_id="g", task_id="t", taskset="calculator", outcome="ok", reward=1.0,
                      trajectories=[tail])
    sample = group_samples([episode, make_episode("g", 1, 0.0)], [1, 1])[0]
    assert sample.trajectory.ids == [1, 2] and sample.trajectory.versions == [-1, 3]


def two_turns(slot, reward, **parts):
    """Ids 0..6: prompt 2, turn "a" 2 sampled, observation 1, turn "b" 2 sampled."""
    mask = [False, False, True, True, False, True, True]
    trajectory = Trajectory(ids=list(range(7)), loss_mask=mask, logprobs=[0.0] * 7,
                            versions=[0 if on else -1 for on in mask], turn_ids=["a", "b"])
    return Episode(episode_id=f"g-s{slot}a0", group_id="g", task_id="t", taskset="calculator", outcome="ok",
                   reward=reward, reward_parts=parts, trajectories=[trajectory])


def test_turns_are_credited_by_what_they_earned_and_what_came_after():
    """Returns: episode 0 earns 0.5 in turn 0 and 1 at the end: 1.5, 1; episode 1 nothing: 0, 0. Means 0.75 and 0.5."""
    group = [two_turns(0, 1.0, **{"turn.0": 0.5, "used_tool": 1.0}), two_turns(1, 0.0)]
    first, second = group_samples(group, [1, 1], "turn")
    assert first.token_credits == [0.0, 0.0, 0.75, 0.75, 0.0, 0.5, 0.5]
    assert second.token_credits == [0.0, 0.0, -0.75, -0.75, 0.0, -0.5, -0.5]
    assert (first.advantage, second.advantage) == (0.5, -0.5)
    assert group_samples(group, [1, 1])[0].token_credits == []


def test_turn_rewards_alone_are_a_signal_only_where_turns_are_credited():
    group = [two_turns(0, 1.0, **{"turn.0": 0.5}), two_turns(1, 1.0)]
    assert admit(group, fresh, pad=False).reason == "zero_variance"
    assert admit(group, fresh, pad=False, advantage="turn").reason == ""
    assert admit([two_turns(0, 1.0), two_turns(1, 1.0)], fresh, pad=False, advantage="turn").reason == "zero_variance"


def test_a_reward_of_a_turn_that_was_not_recorded_counts_for_the_last():
    assert turn_rewards(two_turns(0, 1.0, **{"turn.7": 0.25, "turn.x": 9.0})) == [0.0, 1.25]


def test_turns_after_a_compaction_keep_their_numbers():
    """The second trajectory starts with turn "c", which the agent took third."""
    whole = two_turns(0, 1.0, **{"turn.2": 0.5})
    mask = [False, True, True]
    later = Trajectory(ids=[7, 8, 9], loss_mask=mask, logprobs=[0.0] * 3, versions=[-1, 0, 0], turn_ids=["c"])
    branched = Episode(episode_id="g-s0a0", group_id="g", task_id="t", taskset="calculator", outcome="ok", reward=1.0,
                       reward_parts={"turn.1": 0.5}, trajectories=[*whole.trajectories, later])
    assert turn_rewards(branched) == [0.0, 0.5, 1.0]
    main, rest, _ = group_samples([branched, two_turns(1, 0.0)], [1, 1], "turn")
    assert main.token_credits == [0.0, 0.0, 0.75, 0.75, 0.0, 0.75, 0.75]
    assert rest.token_credits == [0.0, 0.0, 0.0]  # no other episode got that far


def test_episodes_that_are_not_compared_are_kept_alone_and_with_equal_rewards():
    verdict = admit(episodes([1.0]), fresh, pad=True, advantage=None)
    assert (verdict.reason, verdict.multiplicities) == ("", [1])
    assert [sample.advantage for sample in group_samples(episodes([1.0]), [1], None)] == [0.0]
    assert admit(episodes([None]), fresh, pad=True, advantage=None).reason == "too_few_valid"


def test_a_critic_gets_every_reward_where_it_was_earned():
    """Turn 0 ends at id 3, the episode at id 6."""
    group = [two_turns(0, 1.0, **{"turn.0": 0.5}), two_turns(1, 1.0)]
    assert admit(group, fresh, pad=False, advantage="critic").reason == ""
    first, second = group_samples(group, [1, 2], "critic")
    assert first.token_credits == [0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 1.0]
    assert second.token_credits == [0.0] * 6 + [1.0]
    assert (first.advantage, second.advantage, second.weight) == (1.0, 1.0, 2.0)
