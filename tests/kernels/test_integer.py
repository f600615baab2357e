from __future__ import annotations

import math

import pytest
import torch

from glm5.kernels import integer
from glm5.kernels.cpu.library import native, runnable_sets


def random_case(tokens: int, outputs: int, inputs: int, group: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, inputs, generator=generator) * torch.logspace(-6, 6, max(tokens, 1))[:tokens, None]
    levels = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8, generator=generator)
    scale = torch.rand(outputs, -(-inputs // group), generator=generator).bfloat16()
    return x, levels, scale


def test_int8_linear_by_hand() -> None:
    x = torch.tensor([[127.0, -63.6, 0.4], [0.0, 0.0, 0.0]])  # scale 1: levels 127, -64, 0
    levels = torch.tensor([[1, 1, 5], [-127, 2, 0]], dtype=torch.int8)
    scale = torch.tensor([[0.5], [2.0]], dtype=torch.bfloat16)
    assert integer.int8_linear(x, levels, scale).tolist() == [[31.5, -32514.0], [0.0, 0.0]]


def test_int4_linear_by_hand_with_a_smaller_last_group() -> None:
    x = torch.zeros(1, 10)
    x[0, 0], x[0, 8], x[0, 9] = 127.0, 2.0, -1.0
    levels = torch.tensor([[7, 0, 0, 0, 0, 0, 0, 0, -8, 3]], dtype=torch.int8)
    scale = torch.tensor([[1.0, 0.25]], dtype=torch.bfloat16)
    y = integer.int4_linear(x, integer.pack_int4(levels), scale, 8)
    assert y.tolist() == [[7 * 127 + 0.25 * (-16 - 3)]]


@pytest.mark.parametrize(("tokens", "outputs", "inputs", "group"), [
    (0, 3, 16, 8), (1, 1, 1, 1), (3, 5, 7, 7), (2, 9, 17, 8), (65, 6, 40, 16), (4, 130, 300, 128), (129, 3, 128, 128)])
@pytest.mark.parametrize("threads", [1, 2])
def test_native_forms_equal_their_reference_bit_for_bit(tokens: int, outputs: int, inputs: int, group: int,
                                                       threads: int) -> None:
    x, levels, scale = random_case(tokens, outputs, inputs, group)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        int8 = integer.int8_linear(x, levels, scale[:, :1].contiguous())
        int4 = integer.int4_linear(x, integer.pack_int4(levels), scale, group)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(int8, integer.reference_int8_linear(x, levels, scale[:, :1]))
    assert torch.equal(int4, integer.reference_int4_linear(x, integer.pack_int4(levels), scale, group))


@pytest.mark.parametrize("instruction_set", runnable_sets())
def test_every_instruction_set_gives_the_same_bits(instruction_set: str) -> None:
    x, levels, scale = random_case(5, 11, 75, 32)
    words, y, z = integer.pack_int4(levels), torch.empty(5, 11), torch.empty(5, 11)
    functions = native(instruction_set)
    one = scale[:, 0].contiguous()
    functions["int4_linear"](x.data_ptr(), 75, words.data_ptr(), scale.data_ptr(), 5, 11, 75, 32, y.data_ptr(), 1)
    functions["int8_linear"](x.data_ptr(), 75, levels.data_ptr(), one.data_ptr(), 5, 11, 75, z.data_ptr(), 1)
    assert torch.equal(y, integer.reference_int4_linear(x, words, scale, 32))
    assert torch.equal(z, integer.reference_int8_linear(x, levels, one[:, None]))


def test_the_error_stays_within_the_bound_of_the_rounded_inputs() -> None:
    """Each input is off by at most half a step of 1/127 of its token's largest magnitude; weights are exact."""
    x, levels, scale = random_case(16, 24, 96, 32, seed=3)
    weight = levels.double() * scale.double().repeat_interleave(32, 1)
    error = (integer.int4_linear(x, integer.pack_int4(levels), scale, 32).double() - x.double() @ weight.T).abs()
    bound = x.abs().amax(1, keepdim=True).double() / 254 * weight.abs().sum(1)
    assert (error <= bound * (1 + 1e-5)).all() and error.max() > 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_that_is_not_finite_spoils_only_itself(bad: float) -> None:
    x, levels, scale = random_case(3, 4, 20, 8)
    clean = integer.int4_linear(x, integer.pack_int4(levels), scale, 8)
    x[1, 13] = bad
    for form in (integer.int4_linear, integer.reference_int4_linear):
        y = form(x, integer.pack_int4(levels), scale, 8)
        assert torch.equal(y[[0, 2]], clean[[0, 2]]) and not torch.isfinite(y[1]).any()


def test_tiny_and_huge_inputs_keep_their_direction() -> None:
    x = torch.tensor([[1e-44, 0.0], [3.0e38, -3.0e38], [1e-20, 1e-20]])
    levels = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
    scale = torch.full((2, 1), 0.125, dtype=torch.bfloat16)
    y = integer.int8_linear(x, levels, scale)
    assert torch.equal(y, integer.reference_int8_linear(x, levels, scale))
    assert y[0].tolist() == [0.0, 0.0] and y[1, 0] == 0 and y[1, 1] == pytest.approx(7.5e37, rel=1e-6)
    assert y[2, 0] == pytest.approx(2.5e-21, rel=1e-6)


def test_strided_rows_and_other_types_are_accepted() -> None:
    x, levels, scale = random_case(6, 5, 16, 8)
    expected = integer.int4_linear(x, integer.pack_int4(levels), scale, 8)
    wide = torch.zeros(6, 40)
    wide[:, 3:19] = x
    assert torch.equal(integer.int4_linear(wide[:, 3:19], integer.pack_int4(levels), scale, 8), expected)
    y = integer.int4_linear(x.bfloat16(), integer.pack_int4(levels), scale, 8)
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("inputs", [1, 7, 8, 9, 64])
def test_packing_keeps_all_levels(inputs: int) -> None:
    levels = (torch.arange(3 * inputs) % 16 - 8).to(torch.int8).view(3, inputs)
    words = integer.pack_int4(levels)
    assert words.shape == (3, -(-inputs // 8)) and words.dtype == torch.int32
    assert torch.equal(integer.unpack_int4(words, inputs), levels)
    assert integer.pack_int4(torch.tensor([[-7, 1]], dtype=torch.int8)).item() & 0xFF == 0x91
