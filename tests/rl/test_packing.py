import dataclasses

import pytest
import torch

from glm5.records import Sample, Trajectory
from glm5.rl.ledger import LeasedBatch
from glm5.rl.packing import micro_batches


def make_batch(lengths):
    samples = []
    for index, length in enumerate(lengths):
        mask = [t > 0 and t % 2 == 1 for t in range(length)]
        ids = [100 * index + t for t in range(length)]
        trajectory = Trajectory(ids=ids, loss_mask=mask, versions=[0 if on else -1 for on in mask],
                                logprobs=[-float(t) if on else 0.0 for t, on in enumerate(mask)])
        samples.append(Sample(sample_id=f"e{index}/0", episode_id=f"e{index}", group_id="g", taskset="t",
                              trajectory=trajectory, advantage=float(index), weight=1.0))
    staleness = {sample.sample_id: index for index, sample in enumerate(samples)}
    return LeasedBatch(1, 0, 1, len(samples), samples, staleness)


@pytest.mark.parametrize("max_tokens", [10, 16, 40, 1000])
def test_every_sampled_token_is_predicted_once_from_the_token_before_it(max_tokens):
    batch = make_batch([4, 9, 2, 7, 3, 3, 9])
    seen = {}
    for part in micro_batches(batch, max_tokens):
        assert part.ids_BT.numel() <= max(max_tokens, 9)
        flat, documents = part.ids_BT.flatten(), part.documents_BT.flatten()
        assert part.tokens == int((documents >= 0).sum())
        for m, position in enumerate(part.predictors.tolist()):
            label = int(part.labels[m])
            assert flat[position] == label - 1 and flat[position + 1] == label
            assert documents[position] == documents[position + 1]
            assert label not in seen
            seen[label] = (float(part.behaviour[m]), float(part.advantages[m]), int(part.staleness[m]),
                           float(part.coefficients[m]))
    expected = {}
    for index, sample in enumerate(batch.samples):
        sampled = [t for t, on in enumerate(sample.trajectory.loss_mask) if on]
        expected |= {100 * index + t: (-float(t), float(index), index, pytest.approx(1 / len(sampled) / 7))
                     for t in sampled}
    assert seen == expected


def test_positions_restart_with_every_sample_and_padding_has_no_document():
    (part,) = micro_batches(make_batch([5, 3, 2, 1 + 1]), 100)
    assert part.ids_BT.shape == (3, 5)
    assert part.positions_BT[1].tolist() == [0, 1, 2, 0, 1]
    assert part.documents_BT.tolist() == [[0] * 5, [0, 0, 0, 1, 1], [0, 0, -1, -1, -1]]
    assert torch.count_nonzero(part.ids_BT[2, 2:]) == 0


def test_the_longest_sample_sets_the_row_length_even_beyond_the_limit():
    parts = micro_batches(make_batch([9, 2, 2]), 4)
    assert [tuple(part.ids_BT.shape) for part in parts] == [(1, 9), (2, 2)]


def test_tokens_carry_their_turn_and_their_teacher():
    batch = make_batch([4, 4])
    first = dataclasses.replace(batch.samples[0], token_credits=[0.0, 0.5, 0.0, -0.25],
                                teacher_logprobs=[0.0, -3.0, -4.0, -5.0])
    (part,) = micro_batches(dataclasses.replace(batch, samples=[first, batch.samples[1]]), 100)
    assert part.advantages.tolist() == [0.5, -0.25, 1.0, 1.0]
    assert part.teacher[:2].tolist() == [-3.0, -5.0] and part.teacher[2:].isnan().all()
