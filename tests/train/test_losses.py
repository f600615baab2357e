"""Chunked losses against plain ones, the multi-token loss against a loop, gradient isolation, split invariance."""

import dataclasses

import pytest
import torch

from glm5.train.config import OptimizerConfig
from glm5.train.loop import compute_gradients
from glm5.train.losses import (
    Objective,
    chunked_cross_entropy,
    count_step,
    evaluate_lm,
    mtp_mask,
    token_entropy,
    token_logprobs,
)
from glm5.train.optimizers import build_optimizer

from .conftest import packed_batch, tiny_model

FULL = Objective(attention="sparse", main=True, indexer=True, mtp_steps=3, mtp_weight=0.3, balance_weight=0.01)


def head_inputs(tokens=37, width=8, vocabulary=50):
    generator = torch.Generator().manual_seed(0)
    hidden_MD = torch.randn(tokens, width, generator=generator, requires_grad=True)
    weight_WD = torch.randn(vocabulary, width, generator=generator, requires_grad=True)
    return hidden_MD, weight_WD, torch.randint(0, vocabulary, (tokens,), generator=generator)


def largest_saved_or_made(function):
    """Largest number of elements of any tensor that exists while ``function`` runs."""
    with torch.profiler.profile(record_shapes=True) as profile:
        function()
    sizes = [torch.Size(shape).numel() for event in profile.events() for shape in (event.input_shapes or []) if shape]
    return max(sizes)


@pytest.mark.parametrize("chunk_logits", [50, 400, 10**9])
def test_chunked_cross_entropy_equals_the_plain_loss_and_its_gradients(chunk_logits):
    hidden_MD, weight_WD, labels = head_inputs()
    mask = torch.arange(37) % 3 > 0
    plain = torch.nn.functional.cross_entropy((hidden_MD @ weight_WD.T)[mask], labels[mask], reduction="sum")
    expected = torch.autograd.grad(plain * 0.7, (hidden_MD, weight_WD))
    labels = labels.masked_fill(~mask, 10**6)  # labels outside the mask are never read
    loss = chunked_cross_entropy(hidden_MD, weight_WD, labels, mask, chunk_logits)
    found = torch.autograd.grad(loss * 0.7, (hidden_MD, weight_WD))
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_token_logprobs_equal_the_plain_ones_and_their_gradients(temperature):
    hidden_MD, weight_WD, labels = head_inputs()
    factors = torch.linspace(-1, 2, 37)
    plain = torch.log_softmax(hidden_MD @ weight_WD.T / temperature, -1)[torch.arange(37), labels]
    expected = torch.autograd.grad((plain * factors).sum(), (hidden_MD, weight_WD))
    logprobs = token_logprobs(hidden_MD, weight_WD, labels, temperature, chunk_logits=400)
    found = torch.autograd.grad((logprobs * factors).sum(), (hidden_MD, weight_WD))
    torch.testing.assert_close(logprobs, plain)
    torch.testing.assert_close(found, expected)


def test_greedy_log_probs_are_those_of_temperature_one():
    hidden_MD, weight_WD, labels = head_inputs()
    assert torch.equal(token_logprobs(hidden_MD, weight_WD, labels, 0.0), token_logprobs(hidden_MD, weight_WD, labels))


def test_entropy_equals_that_of_the_distribution():
    hidden_MD, weight_WD, _ = head_inputs()
    expected = torch.distributions.Categorical(logits=hidden_MD @ weight_WD.T / 0.7).entropy()
    torch.testing.assert_close(token_entropy(hidden_MD, weight_WD, 0.7, chunk_logits=400), expected.detach())


@pytest.mark.parametrize("loss", [
    lambda h, w, y: chunked_cross_entropy(h, w, y, torch.ones_like(y, dtype=torch.bool), 400).backward(),
    lambda h, w, y: token_logprobs(h, w, y, 1.0, 400).sum().backward(),
])
def test_no_tensor_of_tokens_times_vocabulary_ever_exists(loss):
    assert largest_saved_or_made(lambda: loss(*head_inputs())) <= 400 < 37 * 50


def test_no_masked_token_gives_zero_loss_and_zero_gradients():
    hidden_MD, weight_WD, labels = head_inputs()
    loss = chunked_cross_entropy(hidden_MD, weight_WD, labels, torch.zeros(37, dtype=torch.bool))
    loss.backward()
    assert loss == 0 and not hidden_MD.grad.any() and not weight_WD.grad.any()


def test_the_mtp_loss_equals_a_loop_over_tokens_and_depths():
    model, batch = tiny_model(), packed_batch(rows=2)
    objective = dataclasses.replace(FULL, attention="dense", indexer=False)
    losses = objective(model, batch, count_step(batch, 3))
    hidden_BTD = model.hidden(batch.ids_BT, batch.positions_BT, batch.documents_BT, attention="dense").hidden_BTD
    means = []
    for depth in (1, 2, 3):
        next_ids_BT = torch.roll(batch.ids_BT, -depth, dims=1)
        step = model.mtp(hidden_BTD, next_ids_BT, batch.positions_BT, batch.documents_BT, attention="dense")
        hidden_BTD = step.hidden_BTD
        logprobs_BTW = torch.log_softmax(model.lm_head(hidden_BTD), -1)
        terms = [-logprobs_BTW[b, t, batch.ids_BT[b, t + depth + 1]]
                 for b in range(2) for t in range(batch.ids_BT.shape[1] - depth - 1)
                 if batch.documents_BT[b, t] >= 0 and batch.documents_BT[b, t] == batch.documents_BT[b, t + depth + 1]]
        means.append(torch.stack(terms).mean())
    torch.testing.assert_close(losses.parts["mtp_loss"], torch.stack(means).mean().detach())


def test_mtp_labels_stay_in_their_document_and_under_the_loss_mask():
    batch = packed_batch(rows=1)  # documents of 5, 8 and 9 tokens
    counts = [int(mtp_mask(batch, depth).sum()) for depth in range(5)]
    assert counts == [4 + 7 + 8, 3 + 6 + 7, 2 + 5 + 6, 1 + 4 + 5, 3 + 4]
    only_last = torch.zeros_like(batch.loss_mask_BT)
    only_last[0, 11] = True  # predicts the last token of the second document
    narrow = dataclasses.replace(batch, loss_mask_BT=only_last)
    assert [mtp_mask(narrow, depth).nonzero().tolist() for depth in (1, 2)] == [[[0, 10]], [[0, 9]]]


def test_language_loss_and_indexer_loss_reach_disjoint_parameters():
    model, batch = tiny_model(), packed_batch()
    only_main, only_indexer = dataclasses.replace(FULL, indexer=False), dataclasses.replace(FULL, main=False)
    for objective, inside in ((only_main, False), (only_indexer, True)):
        model.zero_grad()
        objective(model, batch, count_step(batch, 3)).total.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        touched = {name for name, gradient in gradients.items() if gradient.any()}
        assert touched and all((".indexer." in name) == inside for name in touched)
        if inside:  # every indexer learns, the MTP layer's included
            assert {name.split(".indexer.")[0] for name in touched} == {f"model.layers.{n}.self_attn" for n in range(3)}


def test_each_gradient_is_the_same_with_and_without_the_other_loss():
    batch = packed_batch()

    def gradients(objective):
        model = tiny_model()
        objective(model, batch, count_step(batch, 3)).total.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    both = gradients(FULL)
    alone = gradients(dataclasses.replace(FULL, indexer=False)) | {
        name: value for name, value in gradients(dataclasses.replace(FULL, main=False, mtp_steps=3)).items()
        if ".indexer." in name and ".layers.2." not in name}  # without main losses the MTP layer takes one step only
    for name, gradient in alone.items():
        torch.testing.assert_close(both[name], gradient, msg=name)


def test_a_weight_of_zero_leaves_zero_gradients_not_missing_ones():
    model, batch = tiny_model(), packed_batch()
    dataclasses.replace(FULL, indexer_weight=0.0)(model, batch, count_step(batch, 3)).total.backward()
    indexers = [parameter.grad for name, parameter in model.named_parameters() if ".indexer." in name]
    assert indexers and all(gradient is not None and not gradient.any() for gradient in indexers)


@pytest.mark.parametrize("micro_rows", [1, 3])
def test_gradients_do_not_depend_on_the_split_into_micro_batches(micro_rows):
    batch = packed_batch()
    results = []
    for rows in (0, micro_rows):
        model = tiny_model()
        optimizer = build_optimizer(model, OptimizerConfig(clip_norm=0.0))
        result, load_LE = compute_gradients(model, optimizer, FULL, batch, rows)
        results.append((result, load_LE, {name: parameter.grad for name, parameter in model.named_parameters()}))
    (whole, whole_load, whole_grads), (split, split_load, split_grads) = results
    assert torch.equal(whole_load, split_load) and whole.tokens == split.tokens == 4 * 22
    for name, value in whole.losses.items():
        assert split.losses[name] == pytest.approx(value, rel=1e-4)
    for name, gradient in whole_grads.items():
        torch.testing.assert_close(split_grads[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


def test_evaluation_sums_nats_over_labels_of_all_batches():
    model, batch = tiny_model(), packed_batch()
    result = evaluate_lm(model, [batch, batch], "dense")
    logits_BTW = model(batch.ids_BT, batch.positions_BT, batch.documents_BT, attention="dense").logits.detach()
    mask_BT = batch.loss_mask_BT
    plain = torch.nn.functional.cross_entropy(logits_BTW[mask_BT], batch.ids_BT.roll(-1, 1)[mask_BT], reduction="sum")
    assert result.tokens == 2 * int(mask_BT.sum())
    assert result.nats == pytest.approx(2 * float(plain), rel=1e-5)
    assert result.bits_per_byte(3.0) == pytest.approx(result.nats / result.tokens / 3.0 / 0.6931472)


