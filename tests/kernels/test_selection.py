"""The selection of a training step, bit for bit."""

import pytest
import torch

from glm5.errors import KernelError
from glm5.kernels import dispatch, reference

pytestmark = pytest.mark.usefixtures("instruction_set")

SHAPES = [(2, 70, 8, 32, 16), (1, 300, 5, 7, 40), (1, 1100, 16, 64, 30), (1, 9, 1, 2, 32), (2, 800, 9, 37, 3)]
"""Batch, tokens, index heads, index dim, kept. Keys of the longest rows are screened before they are scored."""


def index_inputs(batch, tokens, heads, dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q_BTJX, k_BSX, w_BTJ = (torch.randn(batch, tokens, *rest, generator=generator, requires_grad=True)
                            for rest in ((heads, dim), (dim,), (heads,)))
    first_BT = torch.zeros(batch, tokens, dtype=torch.int32)
    first_BT[:, tokens // 2 :] = tokens // 3
    first_BT[:, -1] = tokens  # padding sees nothing
    last_BT = torch.arange(1, tokens + 1, dtype=torch.int32).expand(batch, -1).clone()
    return q_BTJX, k_BSX, w_BTJ, first_BT, last_BT


def by_masks(q_BTJX, k_BSX, w_BTJ, first_BT, last_BT, k):
    """The mask that scoring every key with the native operation gives."""
    tokens_S = torch.arange(k_BSX.shape[1])
    valid_BTS = (tokens_S >= first_BT[..., None]) & (tokens_S < last_BT[..., None])
    return dispatch.select_topk(dispatch.index_scores(q_BTJX, k_BSX, w_BTJ, 0.3, valid_BTS).detach(), valid_BTS, k)


def mask_of(positions_BTK, keys):
    mask_BTS = torch.zeros(*positions_BTK.shape[:2], keys, dtype=torch.bool)
    for row, query, column in (positions_BTK >= 0).nonzero().tolist():
        mask_BTS[row, query, positions_BTK[row, query, column]] = True
    return mask_BTS


@pytest.mark.parametrize("shape", SHAPES)
def test_the_lists_are_the_keys_that_scoring_every_key_selects(shape):
    batch, tokens, heads, dim, k = shape
    inputs = index_inputs(batch, tokens, heads, dim)
    positions_BTK = dispatch.select_positions(*inputs[:3], 0.3, *inputs[3:], k)
    assert torch.equal(mask_of(positions_BTK, tokens), by_masks(*inputs, k))
    assert torch.equal(positions_BTK, reference.select_positions(*inputs[:3], 0.3, *inputs[3:], k))
    listed = positions_BTK >= 0
    assert torch.equal(listed, listed.int().cummin(-1).values.bool())  # no gap
    assert (positions_BTK.diff(dim=-1)[listed[..., 1:]] > 0).all()  # ascending


HARD = ["ties", "one huge key", "tiny differences", "nan key", "inf keys", "inf query", "nan weight", "zero keys",
        "huge and tiny", "flat keys", "denormal keys", "weights of both signs and none"]


def make_hard(case, q_MJX, k_SX, w_MJ):
    """Changes queries [M, J, X], keys [S, X] and head weights [M, J] so that scores are hard to tell apart."""
    if case == "ties":
        k_SX[:] = k_SX[:3].repeat(len(k_SX) // 3 + 1, 1)[: len(k_SX)]
    elif case == "one huge key":
        k_SX[5] *= 1e6
    elif case == "tiny differences":
        k_SX[:] = k_SX[:1] + 1e-6 * k_SX
    elif case == "nan key":
        k_SX[17, 3] = float("nan")
    elif case == "inf keys":
        k_SX[400, 3], k_SX[401, 3] = float("inf"), float("-inf")
    elif case == "inf query":
        q_MJX[-3, 2, 1] = float("inf")
    elif case == "nan weight":
        w_MJ[-3, 2] = float("nan")
    elif case == "huge and tiny":
        k_SX[100::7] *= 1e15
        k_SX[101::7] *= 1e-15
        q_MJX[3::5] *= 1e-20
    elif case == "flat keys":  # all elements of one size: the longest integers
        k_SX[:], q_MJX[::2] = k_SX.sign(), q_MJX[::2].sign()
    elif case == "denormal keys":
        k_SX *= 1e-41
    elif case == "weights of both signs and none":
        w_MJ *= torch.arange(w_MJ.shape[1]) % 3 - 1
        w_MJ[-5:-3] = 0
    else:
        k_SX.zero_()


@pytest.mark.parametrize("case", HARD)
def test_scores_that_are_hard_to_tell_apart_are_chosen_exactly(case):
    q_BTJX, k_BSX, w_BTJ, first_BT, last_BT = index_inputs(1, 700, 8, 16)
    q_BTJX, k_BSX, w_BTJ = q_BTJX.detach(), k_BSX.detach(), w_BTJ.detach()
    make_hard(case, q_BTJX[0], k_BSX[0], w_BTJ[0])
    positions_BTK = dispatch.select_positions(q_BTJX, k_BSX, w_BTJ, 0.3, first_BT, last_BT, 10)
    expected_BTS = by_masks(q_BTJX, k_BSX, w_BTJ, first_BT, last_BT, 10)
    assert torch.equal(mask_of(positions_BTK, 700), expected_BTS)
    assert expected_BTS.sum(-1).amax() == 10 and not expected_BTS[0, -1].any()


@pytest.mark.parametrize("case", HARD)
@pytest.mark.parametrize(("dtype", "query"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32),
                                              (torch.bfloat16, torch.bfloat16)])
def test_with_and_without_screening_the_same_keys_are_chosen(case, dtype, query):
    """Eighty queries of a slot together screen its keys, each of them alone scores all; some see k keys or less."""
    keys_SX, iq_MJX, iw_MJ = torch.randn(640, 16), torch.randn(80, 8, 16), torch.randn(80, 8)
    make_hard(case, iq_MJX, keys_SX, iw_MJ)
    keys_PSX, slots_M, lengths_M = keys_SX.to(dtype)[None], torch.zeros(80, dtype=torch.int64), torch.arange(561, 641)
    lengths_M[2], lengths_M[7], lengths_M[11] = 9, 0, 16
    iq_MJX = iq_MJX.to(query)
    together_MK = dispatch.ragged_select(iq_MJX, iw_MJ, keys_PSX, slots_M, lengths_M, 16)
    for m, length in enumerate(lengths_M.tolist()):
        alone = dispatch.ragged_select(iq_MJX[m : m + 1], iw_MJ[m : m + 1], keys_PSX, slots_M[:1],
                                       lengths_M[m : m + 1], 16)
        expected = [*range(length), *[-1] * (16 - length)] if alone is None else alone[0].tolist()
        assert together_MK[m].tolist() == expected


@pytest.mark.parametrize("case", ["key rounds down", "key rounds up, negative weight", "query rounds down"])
def test_a_key_that_rounding_puts_below_the_others_is_still_chosen(case):
    """700 equal keys, then five that score a fraction of an integer step higher; rounded, these score lower."""
    ones = torch.ones(1, 1000, 1)
    q_X, others_X, better_X, sign = {
        "key rounds down": ([0.0, 1.0], [1.0, 50.40 / 127], [1.0, 50.49 / 127], 1),
        "key rounds up, negative weight": ([0.0, 1.0], [1.0, 50.60 / 127], [1.0, 50.51 / 127], -1),
        "query rounds down": ([1.0, 30.49 / 63], [30.4 / 63, 0.0], [0.0, 1.0], 1),
    }[case]
    k_BSX = torch.tensor(others_X).repeat(1, 1000, 1)
    k_BSX[0, 900:905] = torch.tensor(better_X)
    q_BTJX = torch.tensor(q_X).repeat(1, 1000, 1, 1)
    last_BT = torch.arange(1, 1001, dtype=torch.int32)[None]
    positions_BTK = dispatch.select_positions(q_BTJX, k_BSX, sign * ones, 1.0, torch.zeros_like(last_BT), last_BT, 20)
    assert positions_BTK[0, 899].tolist() == list(range(20))
    assert positions_BTK[0, 999].tolist() == [*range(15), *range(900, 905)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_of_one_slot_together_choose_what_each_chooses_alone(dtype):
    """Together they screen, in one range or in several that threads share; alone they score every key."""
    table_UZ = torch.randperm(180).view(2, 90).to(torch.int32)
    keys_PSX, iq_MJX, iw_MJ = torch.randn(180, 100, 12).to(dtype), torch.randn(80, 3, 12), torch.randn(80, 3)
    slots_M = torch.arange(80) // 77
    lengths_M = torch.randint(2000, 8900, (80,))
    lengths_M[5], lengths_M[6] = 30, 9000
    arguments = (iq_MJX, iw_MJ, keys_PSX, slots_M, lengths_M)
    alone = [dispatch.ragged_select(*(x[m : m + 1] for x in arguments[:2]), keys_PSX, slots_M[m : m + 1],
                                    lengths_M[m : m + 1], 50, table_UZ) for m in range(80)]
    for threads in (1, 4):
        torch.set_num_threads(threads)
        together_MK = dispatch.ragged_select(*arguments, 50, table_UZ)
        for m, best in enumerate(alone):
            expected = list(range(30)) + [-1] * 20 if best is None else best[0].tolist()
            assert together_MK[m].tolist() == expected


def test_the_lists_do_not_depend_on_the_thread_count():
    inputs = index_inputs(2, 333, 8, 16)
    lists = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        lists.append(dispatch.select_positions(*inputs[:3], 0.3, *inputs[3:], 5))
    assert all(torch.equal(lists[0], other) for other in lists[1:])


def test_a_range_beyond_the_keys_is_refused():
    q_BTJX, k_BSX, w_BTJ, first_BT, last_BT = index_inputs(2, 20, 2, 4)
    last_BT[1, 3] = 21
    with pytest.raises(KernelError, match="query 3 of row 1 sees the keys 0 to 21; there are 20"):
        dispatch.select_positions(q_BTJX, k_BSX, w_BTJ, 0.3, first_BT, last_BT, 5)
