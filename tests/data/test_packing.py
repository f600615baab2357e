"""Rows, batches, resume, the cache: nothing is lost, nothing leaks over a document boundary."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.data.packing import TokenDataset, make_row, pack_first_fit, row_ranges, tokenise
from glm5.data.sources import Document
from glm5.errors import DataError
from glm5.tokenizer import Tokenizer

PAD = 0
streams = st.lists(st.integers(1, 12), min_size=1, max_size=12)


def dataset(sizes: list[int]) -> TokenDataset:
    """Documents of these sizes; token numbers are 1, 2, 3, ... through the whole stream."""
    ends = np.cumsum(sizes)
    table = np.stack([ends, np.array(sizes) * 2], axis=1)
    return TokenDataset(np.arange(1, ends[-1] + 1, dtype=np.uint16), table, PAD)


def owners(sizes: list[int]) -> dict[int, int]:
    """Document of each token number."""
    return {token + 1: owner for token, owner in enumerate(np.repeat(np.arange(len(sizes)), sizes).tolist())}


@given(streams, st.integers(2, 10), st.integers(0, 3))
def test_every_epoch_has_each_token_once_and_padding_is_marked(sizes: list[int], length: int, seed: int) -> None:
    data = dataset(sizes)
    for epoch in (0, 1):
        rows = [data.row(epoch * data.num_rows(length) + n, length, seed) for n in range(data.num_rows(length))]
        kept = [int(token) for row in rows for token in row.ids[row.documents >= 0]]
        assert sorted(kept) == list(range(1, sum(sizes) + 1))
        assert all((row.ids[row.documents < 0] == PAD).all() for row in rows)


@given(streams, st.integers(2, 10))
def test_positions_documents_and_labels_respect_document_boundaries(sizes: list[int], length: int) -> None:
    data, owner = dataset(sizes), owners(sizes)
    for number in range(data.num_rows(length)):
        row = data.row(number, length, 0)
        for t, token in enumerate(row.ids.tolist()):
            follows = t + 1 < length and row.documents[t + 1] >= 0 and owner[token] == owner[int(row.ids[t + 1])]
            assert bool(row.loss_mask[t]) == bool(row.documents[t] >= 0 and follows)
            if follows:
                assert row.documents[t + 1] == row.documents[t]
                assert row.positions[t + 1] == row.positions[t] + 1
            elif t + 1 < length and row.documents[t + 1] >= 0:
                assert row.documents[t + 1] == row.documents[t] + 1
                assert row.positions[t + 1] == 0
        assert row.documents[0] == row.positions[0] == 0


@given(streams, st.integers(2, 10), st.integers(1, 4))
def test_one_ordered_pass_predicts_each_token_within_a_document_once(sizes: list[int], length: int, rows: int) -> None:
    predicted: Counter[int] = Counter()
    for batch in dataset(sizes).ordered_batches(rows, length):
        mask = batch.loss_mask_BT
        predicted.update(batch.ids_BT[:, 1:][mask[:, :-1]].tolist())
        assert not mask[:, -1].any()
    starts = set((np.cumsum([0, *sizes]) + 1).tolist())
    assert predicted == Counter(token for token in range(1, sum(sizes) + 1) if token not in starts)


@settings(max_examples=30)
@given(streams, st.integers(1, 3), st.integers(2, 8), st.integers(0, 9), st.integers(0, 3))
def test_batches_after_resume_are_identical(sizes: list[int], rows: int, length: int, step: int, seed: int) -> None:
    straight = list(islice(dataset(sizes).batches(rows, length, seed), step + 3))[step:]
    resumed = list(islice(dataset(sizes).batches(rows, length, seed, start_step=step), 3))
    for ours, theirs in zip(straight, resumed, strict=True):
        assert torch.equal(ours.ids_BT, theirs.ids_BT)
        assert torch.equal(ours.positions_BT, theirs.positions_BT)
        assert torch.equal(ours.documents_BT, theirs.documents_BT)
        assert torch.equal(ours.loss_mask_BT, theirs.loss_mask_BT)


def test_batches_are_int64_with_a_bool_mask_and_epochs_differ() -> None:
    data = dataset([50, 50])
    batch = next(data.batches(4, 10, seed=3))
    assert [tensor.dtype for tensor in (batch.ids_BT, batch.positions_BT, batch.documents_BT)] == [torch.int64] * 3
    assert (batch.loss_mask_BT.dtype, tuple(batch.ids_BT.shape)) == (torch.bool, (4, 10))
    first, second = (list(islice(data.batches(10, 10, 0), 2))[epoch].ids_BT for epoch in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(first, next(data.batches(10, 10, 1)).ids_BT)


def test_only_trained_tokens_count_when_a_mask_is_given() -> None:
    trained = np.array([False, True, False, True, True])
    row = make_row(np.arange(5), np.array([0, 0, 0, 1, 1]), 7, PAD, trained)
    assert row.loss_mask.tolist() == [True, False, False, True, False, False, False]


def test_documents_are_tokenised_and_each_ended(tokenizer: Tokenizer) -> None:
    texts = ["def f(x):\n", "é <|user|> 12", "y"]
    data = TokenDataset.from_documents([Document(text, str(n)) for n, text in enumerate(texts)], tokenizer)
    (batch,) = data.ordered_batches(1, 4096)
    ids = batch.ids_BT[0][batch.documents_BT[0] >= 0].tolist()
    assert tokenizer.decode(ids) == "".join(text + "<|endoftext|>" for text in texts)
    assert ids.count(tokenizer.pad_id) == data.num_documents == 3
    assert tokenizer.special_id("<|user|>") not in ids
    assert data.num_bytes == sum(len(text.encode()) for text in texts)
    assert data.num_tokens == len(ids)
    with pytest.raises(DataError, match="no text"):
        TokenDataset.from_documents([], tokenizer)


@given(st.lists(st.integers(0, 20), max_size=40), st.integers(20, 40))
def test_first_fit_packs_as_the_plain_search_does(sizes: list[int], length: int) -> None:
    rows: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        free = (row for row in rows if sum(sizes[item] for item in row) + sizes[index] <= length)
        row = next(free, None)
        if row is None:
            rows.append([index])
        else:
            row.append(index)
    assert pack_first_fit(sizes, length) == rows


@given(streams, st.integers(2, 10), st.integers(0, 3))
def test_whole_packing_has_each_token_once_and_cuts_only_long_documents(
    sizes: list[int], length: int, seed: int
) -> None:
    stream = dataset(sizes)
    data = TokenDataset(stream._ids, np.stack([np.cumsum(sizes), sizes], axis=1), PAD, "whole")
    rows = [data.row(n, length, seed) for n in range(data.num_rows(length))]
    assert sorted(int(token) for row in rows for token in row.ids[row.documents >= 0]) == list(range(1, sum(sizes) + 1))
    owner = owners(sizes)
    for row in rows:
        for document in range(int(row.documents.max()) + 1):
            ids = row.ids[row.documents == document].tolist()
            (source,) = {owner[token] for token in ids}
            size = sizes[source]
            assert len(ids) == size or (size > length and len(ids) in (length, size % length))
            assert ids == list(range(ids[0], ids[0] + len(ids)))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 5))
def test_ranks_share_each_batch_and_any_number_of_them_continues_the_same_stream(
    world: int, share: int, step: int
) -> None:
    rows = world * share
    parts = [next(row_ranges(rows, step, rank, world)) for rank in range(world)]
    assert [number for part in parts for number in part] == list(range(step * rows, (step + 1) * rows))
    assert list(islice(row_ranges(rows, step), 2))[1] == range((step + 1) * rows, (step + 2) * rows)


def test_rows_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(DataError, match="batch_rows=8 cannot be shared by 3 ranks"):
        next(row_ranges(8, 0, 0, 3))


def test_sections_are_tokenised_after_their_special_tokens(tokenizer: Tokenizer) -> None:
    ids, table = tokenise([[("<|code_prefix|>", "ab"), ("", "c")], [("", "")]], tokenizer)
    assert tokenizer.decode(ids.tolist()) == "<|code_prefix|>abc<|endoftext|><|endoftext|>"
    assert table[:, 1].tolist() == [3, 0]
    assert table[-1, 0] == len(ids)
