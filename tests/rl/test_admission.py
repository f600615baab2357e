import pytest

from glm5.records import Episode, Trajectory
from glm5.rl.admission import admit, group_samples, is_measured, sampled_versions

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
