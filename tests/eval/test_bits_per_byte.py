"""Bits per byte against a sum over single tokens."""

import math

import pytest
import torch

from glm5.errors import DataError
from glm5.eval.suites.bits_per_byte import bits_per_byte, split_windows
from glm5.model.config import preset
from glm5.model.transformer import GlmMoeDsaForCausalLM


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return GlmMoeDsaForCausalLM(preset("nano"), torch.Generator().manual_seed(0)).eval()


def test_windows_predict_every_id_but_the_first_once():
    assert list(split_windows([1, 2, 3, 4, 5, 6], 2)) == [[1, 2, 3], [3, 4, 5], [5, 6]]
    assert list(split_windows([1, 2, 3], 5)) == [[1, 2, 3]]
    assert list(split_windows([1], 5)) == []


def test_the_sum_equals_one_document_at_a_time(model):
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(0, 512, (size,), generator=generator).tolist() for size in (40, 7, 1, 25)]
    nats = 0.0
    with torch.no_grad():
        for ids in documents:
            for window in split_windows(ids, 16):
                logprobs = model(torch.tensor([window[:-1]]), attention="dense").logits.log_softmax(-1)[0]
                nats -= float(logprobs[torch.arange(len(window) - 1), torch.tensor(window[1:])].sum())
    for rows in (1, 3):
        bits = bits_per_byte(model, documents, 100, length=16, batch_rows=rows, attention="dense")
        assert bits == pytest.approx(nats / math.log(2) / 100, rel=1e-5)


def test_a_random_model_needs_about_the_entropy_of_its_vocabulary(model):
    documents = [torch.randint(0, 512, (65,), generator=torch.Generator().manual_seed(2)).tolist()]
    bits = bits_per_byte(model, documents, 64, length=64)
    assert bits == pytest.approx(math.log2(model.config.vocab_size), abs=0.5)


def test_scoring_leaves_the_model_trainable(model):
    bits_per_byte(model, [[1, 2, 3]], 3, length=8)
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert model.lm_head.weight.grad is not None


@pytest.mark.parametrize(("documents", "num_bytes"), [([], 10), ([[1]], 10), ([[1, 2]], 0)])
def test_nothing_to_predict_is_an_error(model, documents, num_bytes):
    with pytest.raises(DataError, match="nothing to predict"):
        bits_per_byte(model, documents, num_bytes, length=8)
