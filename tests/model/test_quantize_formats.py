from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm5.errors import CheckpointError
from glm5.model import fp8
from glm5.model.quantize.formats import dequantise, fake_quantise, quantise, round_inputs
from glm5.model.quantize.plan import WeightFormat

INT4, INT8, FP8 = WeightFormat("int4", 8), WeightFormat("int8"), WeightFormat("fp8")


def awkward(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes: normal numbers, zeros, subnormals, the largest fp32 number, alternating signs."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))
    rows = [weight, torch.zeros(1, inputs), torch.full((1, inputs), 1e-42), torch.full((1, inputs), -3.0e-38),
            torch.full((1, inputs), torch.finfo(torch.float32).max), weight[:1] * 1e30, -weight[:1] * 1e-30,
            torch.where(torch.arange(inputs) % 2 == 0, 0.5, -0.5)[None], torch.tensor([[-0.0] * inputs])]
    return torch.cat(rows)


def test_int4_by_hand_with_a_smaller_last_group() -> None:
    weight = torch.tensor([[7.0, -3.5, 2.4, 0.0, 1.5, 2.5, -7.0, 0.4, 14.0, -3.0]])
    levels, scale = quantise(weight, INT4)
    assert scale.tolist() == [[1.0, 2.0]] and scale.dtype == torch.bfloat16
    assert levels.tolist() == [[7, -4, 2, 0, 2, 2, -7, 0, 7, -2]]  # halves go to the even level
    assert dequantise(levels, scale, INT4).tolist() == [[7, -4, 2, 0, 2, 2, -7, 0, 14, -4]]


def test_int8_has_one_scale_for_an_output_row() -> None:
    levels, scale = quantise(torch.tensor([[127.0, -0.6], [254.0, 1.0]]), INT8)
    assert scale.tolist() == [[1.0], [2.0]] and levels.tolist() == [[127, -1], [127, 0]]


@pytest.mark.parametrize("form", [INT4, INT8, FP8])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 8), (4, 9), (130, 200), (2, 384)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_are_within_half_a_step_and_extremes_stay_finite(form: WeightFormat, shape: tuple[int, int],
                                                               dtype: torch.dtype) -> None:
    weight = awkward(*shape).to(dtype)
    weight = weight.nan_to_num(posinf=torch.finfo(dtype).max)
    rounded = fake_quantise(weight, form)
    assert rounded.dtype == dtype and rounded.shape == weight.shape and torch.isfinite(rounded).all()
    if form.kind == "fp8":
        return  # its error is tested with the published format
    levels, scale = quantise(weight, form)
    width = min(form.group_size, shape[1]) if form.kind == "int4" else shape[1]
    step = scale.float().repeat_interleave(width, 1)[:, : shape[1]]
    top = 7 if form.kind == "int4" else 127
    error = (dequantise(levels, scale, form) - weight.float()).abs()
    largest = levels.abs() == top  # these may also miss what bf16 or the limit of the range takes from the scale
    assert (error <= torch.where(largest, 0.5 * step + top * step / 128, 0.5 * step) * (1 + 1e-6)).all()
    assert (rounded[shape[0]] == 0).all() and (rounded[shape[0] + 1] == 0).all()


@pytest.mark.parametrize("form", [INT4, INT8])
@given(data=st.data())
def test_rounding_is_a_projection(form: WeightFormat, data: st.DataObject) -> None:
    numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
    inputs = data.draw(st.integers(1, 20))
    weight = torch.tensor(data.draw(st.lists(numbers, min_size=inputs, max_size=inputs)))[None]
    once = fake_quantise(weight, form)
    assert torch.isfinite(once).all() and torch.equal(fake_quantise(once, form), once)


@pytest.mark.parametrize("form", [INT4, INT8, FP8])
def test_a_stack_is_rounded_matrix_by_matrix(form: WeightFormat) -> None:
    stack = torch.randn(3, 2, 130, 140, generator=torch.Generator().manual_seed(1))
    levels, scale = quantise(stack, form)
    for e in range(3):
        for part in range(2):
            one = quantise(stack[e, part], form)
            assert torch.equal(one[0].float(), levels[e, part].float()) and torch.equal(one[1], scale[e, part])
    assert torch.equal(fake_quantise(stack, form)[1, 1], fake_quantise(stack[1, 1], form))


def test_fp8_is_the_published_format() -> None:
    weight = torch.randn(200, 130, generator=torch.Generator().manual_seed(2))
    values, scale = fp8.quantise(weight)
    found = quantise(weight, FP8)
    assert torch.equal(found[0].float(), values.float()) and torch.equal(found[1], scale)
    assert torch.equal(fake_quantise(weight, FP8), fp8.dequantise(values, scale, torch.float32))


@pytest.mark.parametrize("form", [INT4, INT8, FP8])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(form: WeightFormat, bad: float) -> None:
    weight = torch.ones(3, 9)
    weight[1, 4] = bad
    with pytest.raises(CheckpointError, match="not a finite number"):
        quantise(weight, form)


def test_half_precision_weights_do_not_overflow() -> None:
    weight = torch.full((1, 8), 65504.0, dtype=torch.float16)
    assert torch.isfinite(fake_quantise(weight, INT4)).all() and torch.isfinite(fake_quantise(weight, INT8)).all()


def test_inputs_are_rounded_per_token_or_per_block() -> None:
    x = torch.tensor([[127.0, 1.4, -0.4], [2.54, 0.0, 0.02]])
    torch.testing.assert_close(round_inputs(x, INT8), torch.tensor([[127.0, 1, 0], [2.54, 0, 0.02]]))
    assert round_inputs(x, WeightFormat("int8", rounds_inputs=False)) is x
    wide = torch.randn(4, 200, generator=torch.Generator().manual_seed(3))
    wide[:, 150] = 1000.0  # spoils the second block only
    rounded = round_inputs(wide, FP8)
    error = (rounded - wide).abs()
    assert (error[:, :128] <= wide[:, :128].abs() / 16 + 5 / 448 * 2.0**-10).all()
    assert (error[:, 128:] <= wide[:, 128:].abs() / 16 + 1000 / 448 * 2.0**-10).all()
    assert round_inputs(wide.bfloat16(), FP8).dtype == torch.bfloat16
