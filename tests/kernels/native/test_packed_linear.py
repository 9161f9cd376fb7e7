"""Packed weights and products with them, against plain torch on the weights they stand for, by each instruction set."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from gguf.quants import dequantize
from torch import Tensor

from procengine.errors import ConfigError
from procengine.kernels.linear.native import packed_linear
from procengine.kernels.linear.packed import GGML_FORMATS, PackedFormat, PackedMatrix, WeightMemory, gate_up_order
from procengine.kernels.native import library
from tests.kernels.native.arrays import pack, unpack

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the native library is not built")

FORMATS = {
    "bf16": PackedFormat("bf16"),
    "int8": PackedFormat("int8"),
    "int8-groups-of-16": PackedFormat("int8", group=16),
    "int8-mins": PackedFormat("int8", mins=True),
    "int8-channel-scales": PackedFormat("int8", channel_scales=True),
    "int4": PackedFormat("int4"),
    "int4-mins": PackedFormat("int4", mins=True),
    "int4-channel-scales": PackedFormat("int4", group=64, channel_scales=True),
}
# [N, K], M: below, at and above the sizes of panels, tiles and blocks of rows.
SHAPES = (
    *((outputs, inputs, rows) for outputs, inputs in ((1, 64), (33, 64), (100, 192)) for rows in (0, 1, 7)),
    *((64, 64, rows) for rows in range(3, 30, 8)),
    (40, 1536, 200),
)
# Relative to the sum of the sizes of what is added up: fp32 sums in another order.
TOLERANCE = 1e-6


@pytest.fixture(scope="module", params=list(library.Isa), ids=lambda isa: isa.name.lower())
def isa(request: pytest.FixtureRequest) -> Iterator[library.Isa]:
    if request.param > library.best_isa():
        pytest.skip(f"this CPU has no {request.param.name}")
    with library.forced_isa(request.param):
        yield request.param


@pytest.fixture(scope="module", autouse=True)
def three_threads() -> Iterator[None]:
    before = library.num_threads()
    library.set_num_threads(3)
    yield
    library.set_num_threads(before)


def random_matrix(packed_format: PackedFormat, outputs: int, inputs: int) -> PackedMatrix:
    matrix = PackedMatrix(packed_format, outputs, inputs)
    pack(matrix, torch.randn(outputs, inputs) * torch.rand(outputs, 1) * 0.1)
    return matrix


def by_tiles() -> bool:
    """Whether the instruction set in use multiplies bf16 alone, integers as such too."""
    return library.isa() == library.Isa.AMX


def rounded(x: Tensor, packed_format: PackedFormat) -> Tensor:
    """The activations that the kernels multiply, float64."""
    if packed_format.kind == "bf16" or by_tiles():
        return x.bfloat16().double()
    groups = x.float().unflatten(1, (-1, packed_format.group))
    peak = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(peak > 1e-30, torch.full_like(peak, 127) / peak, 0)  # `127 / peak` would round twice
    scaled = groups * inverse
    steps = scaled.round()
    rest = torch.where(has_rest(peak), ((scaled - steps) * 254).round(), 0)
    result: Tensor = (steps.double() + rest.double() / 254) * (peak / 127).double()
    return result.flatten(1)


def has_rest(peak: Tensor) -> Tensor:
    """Which groups of a row are outliers: 3.4 times the mean of the logarithms, which a float's bits are in effect."""
    bits = peak.contiguous().view(torch.int32).long()
    mean = bits.sum(1, keepdim=True) // (peak > 0).sum(1, keepdim=True).clamp(min=1)
    return (bits > mean + (7 << 21)) & (peak > 1e-30)


def weights(matrix: PackedMatrix) -> Tensor:
    """The weights that the kernels multiply, float64 [N, K]."""
    exact = unpack(matrix)
    if matrix.format.kind == "bf16" or not by_tiles():
        return exact.double()
    # 256 times as large, as fp16, of which eight bits are kept, a half away from zero; what is not normal is zero.
    scaled = (exact * 256).half()
    scaled[scaled.abs() < 2**-14] = 0
    steps = (scaled.view(torch.int16) + 4) >> 3 << 3
    return steps.view(torch.half).double() / 256


def reference(x: Tensor, matrix: PackedMatrix) -> Tensor:
    product: Tensor = rounded(x, matrix.format) @ weights(matrix).T
    return product


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def assert_is_product(actual: Tensor, x: Tensor, matrix: PackedMatrix) -> None:
    size = rounded(x, matrix.format).abs() @ unpack(matrix).double().abs().T
    # By tiles a min is added and rounded at once, to fp16: a weight may be the bf16 number next to what `weights` says.
    tolerance = 2**-8 if by_tiles() and matrix.format.mins else TOLERANCE
    assert bool(((actual.double() - reference(x, matrix)).abs() <= tolerance * size).all())


@pytest.mark.parametrize("name", FORMATS)
def test_product_matches_torch_on_the_same_weights(name: str, isa: library.Isa) -> None:
    for (outputs, inputs, rows), dtype in zip(SHAPES, itertools.cycle((torch.float32, torch.bfloat16)), strict=False):
        matrix = random_matrix(FORMATS[name], outputs, inputs)
        x = torch.randn(rows, inputs).to(dtype)
        y = packed_linear(x, matrix, out=torch.full((rows, outputs), torch.nan))
        assert_is_product(y, x, matrix)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "bf16"])
def test_groups_with_outliers_are_multiplied_with_twice_the_digits(name: str, isa: library.Isa) -> None:
    matrix, x = random_matrix(FORMATS[name], 40, 64 * 70), torch.randn(9, 64 * 70)
    x[:, 100] = 50
    x[4, 4400] = 1000  # a group of one row, beyond those that the first mask word tells of
    x[7] = 0
    peaks = x.unflatten(1, (-1, matrix.format.group)).abs().amax(-1, keepdim=True)
    assert has_rest(peaks).sum(1).flatten().tolist() == [1, 1, 1, 1, 2, 1, 1, 0, 1]
    assert_is_product(packed_linear(x, matrix), x, matrix)


@pytest.mark.parametrize("name", ["bf16", "int8", "int4-mins"])
def test_a_row_gets_the_same_result_in_any_batch(name: str, isa: library.Isa) -> None:
    matrix, x = random_matrix(FORMATS[name], 70, 96), torch.randn(40, 96)
    whole = packed_linear(x, matrix)
    for rows in (slice(0, 1), slice(3, 5), slice(20, 33)):
        assert torch.equal(packed_linear(x[rows], matrix), whole[rows])


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_and_residual_are_added_on_the_way_out(name: str, dtype: torch.dtype, isa: library.Isa) -> None:
    matrix, x = random_matrix(FORMATS[name], 45, 64), torch.randn(5, 64)
    bias, stream = torch.randn(45), torch.randn(5, 45).to(dtype)
    expected = reference(x, matrix) + bias.double() + stream.double()
    y = packed_linear(x, matrix, bias, residual=stream, out=stream)
    assert y.data_ptr() == stream.data_ptr()
    assert_close(y, expected, 1e-5 if dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_silu_mul_multiplies_gates_with_their_ups(name: str, isa: library.Isa) -> None:
    inner, inputs = 48, 64
    matrix = PackedMatrix(FORMATS[name], 2 * inner, inputs)
    order = torch.from_numpy(gate_up_order(inner))
    pack(matrix, torch.randn(2 * inner, inputs) * 0.5, order)
    x, bias = torch.randn(9, inputs), torch.randn(2 * inner)
    gate, up = (rounded(x, matrix.format) @ weights(matrix)[order].T + bias[order].double()).split(inner, dim=1)
    assert_close(packed_linear(x, matrix, bias, silu_mul=True), functional.silu(gate) * up, 1e-5)


def test_rows_and_results_may_be_parts_of_wider_ones(isa: library.Isa) -> None:
    matrix = random_matrix(FORMATS["int8"], 33, 64)
    x, out = torch.randn(4, 100), torch.full((4, 50), 7.0)
    packed_linear(x[:, 20:84], matrix, out=out[:, 5:38])
    assert_is_product(out[:, 5:38], x[:, 20:84], matrix)
    assert bool((out[:, :5] == 7).all()) and bool((out[:, 38:] == 7).all())


def test_activations_of_zeros_and_of_tiny_numbers_give_zeros(isa: library.Isa) -> None:
    matrix = random_matrix(FORMATS["int8"], 32, 64)
    for x in (torch.zeros(2, 64), torch.full((2, 64), 1e-40)):
        assert bool((packed_linear(x, matrix) == 0).all())


def test_largest_weights_and_activations_do_not_overflow(isa: library.Isa) -> None:
    for name in ("int8", "int8-channel-scales", "int4"):
        matrix = PackedMatrix(FORMATS[name], 32, 4096)
        pack(matrix, torch.ones(32, 4096))
        x = -torch.ones(1, 4096)
        assert_is_product(packed_linear(x, matrix), x, matrix)


# Packing


@pytest.mark.parametrize(("name", "step"), [("int8", 1 / 127), ("int8-channel-scales", 1 / 127), ("int4", 1 / 7)])
def test_packing_rounds_to_the_nearest_of_the_steps(name: str, step: float) -> None:
    weights = torch.randn(50, 128)
    matrix = PackedMatrix(FORMATS[name], 50, 128)
    pack(matrix, weights)
    size = 128 if matrix.format.channel_scales else matrix.format.group
    peak = weights.reshape(50, -1, size).abs().amax(-1, keepdim=True).expand(-1, -1, size).reshape(50, 128)
    assert bool(((unpack(matrix) - weights).abs() <= peak * step / 2 * 1.01).all())


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "bf16"])
def test_the_largest_weight_is_bounded_by_its_scale(name: str) -> None:
    weights = torch.rand(40, 128) * 300
    matrix = PackedMatrix(FORMATS[name], 40, 128)
    pack(matrix, weights)
    assert float(weights.max()) * 0.99 <= matrix.largest() <= 2 * 300 * 1.2  # from where a min is, to twice as far


def test_packing_with_mins_spans_smallest_to_largest() -> None:
    weights = torch.rand(50, 128) + 5
    matrix = PackedMatrix(FORMATS["int4-mins"], 50, 128)
    pack(matrix, weights)
    assert float((unpack(matrix) - weights).abs().max()) < 1 / 15 / 2 + 0.004  # + the fp16 rounding of the mins


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bf16_packing_is_rounding(dtype: torch.dtype) -> None:
    weights = torch.randn(40, 64).to(dtype)
    matrix = PackedMatrix(FORMATS["bf16"], 40, 64)
    pack(matrix, weights)
    assert torch.equal(unpack(matrix), weights.bfloat16().float())


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_packed_where_they_are_told(name: str) -> None:
    weights, order = torch.randn(70, 64), torch.randperm(70)
    at_once, scattered = (PackedMatrix(FORMATS[name], 70, 64) for _ in range(2))
    pack(at_once, weights)
    pack(scattered, weights[:30][order[order < 30]], order[order < 30])
    pack(scattered, weights[30:], torch.arange(30, 70))
    assert torch.equal(unpack(scattered), unpack(at_once))
    assert torch.equal(unpack(scattered, order), unpack(at_once)[order])


def random_blocks(ggml_type: str, rows: int, inputs: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Blocks of random bits, but for their fp16 scales: those are random numbers."""
    generator = np.random.default_rng(0)
    size, size_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[ggml_type]]
    blocks = generator.integers(0, 256, (rows * inputs // size, size_bytes), dtype=np.uint8)
    halves = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(ggml_type, (0,))
    for start in halves:
        scales = generator.normal(size=len(blocks)).astype(np.float16)
        blocks[:, start : start + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("ggml_type", GGML_FORMATS)
def test_ggml_blocks_are_packed_as_they_are(ggml_type: str) -> None:
    blocks = random_blocks(ggml_type, 40, 512)
    expected = torch.from_numpy(dequantize(blocks, gguf.GGMLQuantizationType[ggml_type]))
    matrix = PackedMatrix(GGML_FORMATS[ggml_type], 40, 512)
    matrix.pack_blocks(blocks, ggml_type)
    if ggml_type.endswith("_K"):  # scales are products, rounded to fp16
        torch.testing.assert_close(unpack(matrix), expected, rtol=0, atol=float(expected.abs().max()) * 2**-10)
    else:
        assert torch.equal(unpack(matrix), expected)


@pytest.mark.parametrize("ggml_type", GGML_FORMATS)
def test_the_widest_format_holds_every_ggml_type(ggml_type: str) -> None:
    blocks = random_blocks(ggml_type, 40, 512)
    own, wide = (PackedMatrix(f, 40, 512) for f in (GGML_FORMATS[ggml_type], PackedFormat("int8", 16, mins=True)))
    for matrix in (own, wide):
        matrix.pack_blocks(blocks, ggml_type)
    assert torch.equal(unpack(own), unpack(wide))


def test_symmetric_blocks_fit_among_those_with_mins() -> None:
    blocks = random_blocks("Q4_0", 8, 64)
    symmetric, with_mins = PackedMatrix(FORMATS["int4"], 8, 64), PackedMatrix(FORMATS["int4-mins"], 8, 64)
    for matrix in (symmetric, with_mins):
        matrix.pack_blocks(blocks, "Q4_0")
    assert torch.equal(unpack(symmetric), unpack(with_mins))


def test_matrices_share_memory_without_overlap() -> None:
    sizes = [PackedMatrix.packed_bytes(FORMATS["int8"], outputs, 64) for outputs in (33, 1, 64)]
    memory = WeightMemory(sum(sizes))
    weights = [torch.randn(outputs, 64) for outputs in (33, 1, 64)]
    matrices = [PackedMatrix(FORMATS["int8"], len(rows), 64, memory) for rows in weights]
    for matrix, rows in zip(matrices, weights, strict=True):
        pack(matrix, rows)
    for matrix, rows in zip(matrices, weights, strict=True):
        torch.testing.assert_close(unpack(matrix), rows, rtol=0, atol=0.02)


# Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "int8", "group": 8}, "multiple of 16, not 8"),
        ({"kind": "int8", "group": 40}, "multiple of 16, not 40"),
        ({"kind": "bf16", "mins": True}, "with mins"),
        ({"kind": "int4", "mins": True, "channel_scales": True}, "with mins"),
    ],
)
def test_formats_that_no_kernel_reads_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PackedFormat(**arguments)  # type: ignore[arg-type]


def test_bad_arguments_are_refused() -> None:
    matrix = random_matrix(FORMATS["int8"], 33, 64)
    refused: dict[str, Callable[[], object]] = {
        r"\[M, 64\]": lambda: packed_linear(torch.randn(2, 32), matrix),
        "float32 or bfloat16": lambda: packed_linear(torch.randn(2, 64).half(), matrix),
        "not torch.float32": lambda: packed_linear(torch.randn(64, 2).T, matrix),
        "multiple of 32 outputs, not 33": lambda: packed_linear(torch.randn(2, 64), matrix, silu_mul=True),
        r"bias must be float32 \[33\]": lambda: packed_linear(torch.randn(2, 64), matrix, torch.randn(32)),
        "residual must be": lambda: packed_linear(torch.randn(2, 64), matrix, residual=torch.randn(2, 32)),
        "out must be": lambda: packed_linear(torch.randn(2, 64), matrix, out=torch.randn(2, 32)),
        r"rows to pack must be floats \[n, 64\]": lambda: pack(matrix, torch.randn(2, 32)),
        "between 0 and 32": lambda: pack(matrix, torch.randn(1, 64), torch.tensor([33])),
        "as many outputs": lambda: pack(matrix, torch.randn(2, 64), torch.tensor([1])),
        r"must be uint8 \[n, 68\]": lambda: matrix.pack_blocks(np.zeros((2, 36), np.uint8), "Q8_0"),
        "cannot hold Q4_1": lambda: matrix.pack_blocks(np.zeros((2, 40), np.uint8), "Q4_1"),
        "no packed format for ggml type IQ2_XS": lambda: matrix.pack_blocks(np.zeros(1, np.uint8), "IQ2_XS"),
        "multiple of 32": lambda: PackedMatrix(FORMATS["int8"], 4, 40),
    }
    for message, refuse in refused.items():
        with pytest.raises(ConfigError, match=message):
            refuse()
