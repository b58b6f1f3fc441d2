"""The native reduction against torch, on every instruction set of this CPU."""

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy import _native

OPS = ["sum", "avg", "min", "max", "prod"]
BITWISE = ["band", "bor", "bxor"]
DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i32": torch.int32,
    "i64": torch.int64,
    "i8": torch.int8,
    "u8": torch.uint8,
    "i16": torch.int16,
}
MOVED_ONLY = ["boolean", "c64", "c128", "raw1", "raw2", "raw4", "raw8"]
FLOATS = [name for name, dtype in DTYPES.items() if dtype.is_floating_point]
HALVES = ["bf16", "f16"]
INTEGERS = [name for name in DTYPES if name not in FLOATS]
COMBINATIONS = [*itertools.product(OPS, DTYPES), *itertools.product(BITWISE, INTEGERS)]
ISAS = _native.instruction_sets()
pytestmark = pytest.mark.usefixtures("one_torch_thread")
COUNTS = [0, 1, 7, 64, 1000, 4097]
FILLER = 0xAA  # around each buffer, to see a write beyond it


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def native(
    op: str, sources: list[torch.Tensor], isa: str | None = None, out_is: int | None = None, misalign: int = 0
) -> torch.Tensor:
    """Reduce copies of `sources`, each displaced by another number of bytes, into a new buffer or source `out_is`."""
    dtype = sources[0].dtype
    count, size = sources[0].numel(), sources[0].numel() * sources[0].element_size()
    buffers = [torch.full((size + 192,), FILLER, dtype=torch.uint8) for _ in range(len(sources) + 1)]
    starts = [64 + misalign * (i + 1) for i in range(len(buffers))]
    for buffer, start, source in zip(buffers, starts, sources, strict=False):
        buffer[start : start + size] = source.contiguous().view(torch.uint8)
    addresses = [buffer.data_ptr() + start for buffer, start in zip(buffers, starts, strict=True)]
    target = len(sources) if out_is is None else out_is
    name = next(name for name, value in DTYPES.items() if value == dtype)

    _native.reduce(op, name, addresses[target], addresses[:-1], count, isa)

    for i, (buffer, start) in enumerate(zip(buffers, starts, strict=True)):
        outside = torch.cat([buffer[:start], buffer[start + size :]])
        assert bool((outside == FILLER).all()), f"wrote outside buffer {i}"
        if i < len(sources) and i != target:
            assert torch.equal(buffer[start : start + size], sources[i].view(torch.uint8)), f"wrote to source {i}"
    return buffers[target][starts[target] : starts[target] + size].clone().view(dtype)


TORCH_NAMES = {
    "sum": "add",
    "avg": "add",
    "min": "minimum",
    "max": "maximum",
    "prod": "mul",
    "band": "bitwise_and",
    "bor": "bitwise_or",
    "bxor": "bitwise_xor",
}


def expected(op: str, sources: list[torch.Tensor]) -> torch.Tensor:
    """The same by torch, one source after the other."""
    dtype = sources[0].dtype
    wide = [s.float() if dtype in (torch.bfloat16, torch.float16) else s for s in sources]
    result: torch.Tensor = functools.reduce(getattr(torch, TORCH_NAMES[op]), wide)
    if op == "avg":
        rounding = None if dtype.is_floating_point else "trunc"
        result = torch.div(result, torch.full_like(result, len(sources)), rounding_mode=rounding)
    return canonical(result.to(dtype))


def canonical(values: torch.Tensor) -> torch.Tensor:
    """With one and the same NaN wherever there is one: torch, like a CPU, leaves open which."""
    if not values.dtype.is_floating_point:
        return values
    return torch.where(values.isnan(), torch.tensor(float("nan"), dtype=values.dtype), values)


def matches(op: str, result: torch.Tensor, reference: torch.Tensor) -> bool:
    """Bit for bit, except that torch does not say which zero is the smaller of 0 and -0."""
    if op in ("min", "max") and result.dtype.is_floating_point:
        zero = torch.zeros((), dtype=result.dtype)
        result, reference = (torch.where(v == 0, zero, v) for v in (result, reference))
    return same_bits(result, reference)


def samples(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Half plain numbers, half any bits at all: NaN, infinities, denormals, extreme integers."""
    rng = torch.Generator().manual_seed(seed)
    size = torch.empty((), dtype=dtype).element_size()
    wild = torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=rng).view(dtype)
    plain = (torch.randn(count, generator=rng) * 8).to(dtype)
    return torch.where(torch.rand(count, generator=rng) < 0.5, plain, wild)


def special_floats(dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    denormal = info.tiny * info.eps
    values = [0.0, 1.0, 3.0, info.max, info.tiny, denormal, 3 * denormal, info.tiny - denormal, float("inf")]
    return torch.tensor([*values, *(-v for v in values), float("nan")], dtype=dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("op", "dtype"), COMBINATIONS)
def test_agrees_with_torch(op: str, dtype: str, isa: str) -> None:
    for n, count in itertools.product([1, 2, 3, 5], COUNTS):
        sources = [samples(DTYPES[dtype], count, seed=10 * count + i) for i in range(n)]
        result = native(op, sources, isa, misalign=count % 3)
        assert matches(op, result, expected(op, sources)), f"{n} sources of {count}"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", OPS)
def test_special_values(op: str, dtype: str, isa: str) -> None:
    values = special_floats(DTYPES[dtype])
    sources = [column.contiguous() for column in torch.cartesian_prod(values, values, values).unbind(1)]
    for n in (1, 2, 3):
        assert matches(op, native(op, sources[:n], isa), expected(op, sources[:n]))


@pytest.mark.parametrize(("op", "dtype"), COMBINATIONS)
def test_out_may_be_any_source(op: str, dtype: str) -> None:
    for isa, n in itertools.product(ISAS, [1, 2, 3, 5]):
        sources = [samples(DTYPES[dtype], 4097, seed=i) for i in range(n)]
        separate = native(op, sources, isa)
        for k in range(n):
            assert same_bits(native(op, sources, isa, out_is=k, misalign=1), separate), f"{isa}, source {k} of {n}"


def test_one_buffer_may_be_several_sources() -> None:
    x = samples(torch.float32, 1000, seed=0)
    doubled = x.clone()
    _native.reduce("sum", "f32", doubled.data_ptr(), [doubled.data_ptr()] * 2, x.numel())
    assert same_bits(doubled, canonical(x + x))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("isa", ISAS)
def test_every_half_survives_the_way_through_float(dtype: str, isa: str) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(DTYPES[dtype])
    assert same_bits(native("sum", [every], isa), canonical(every))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("isa", ISAS)
def test_halves_round_to_nearest_even(dtype: str, isa: str) -> None:
    patterns = torch.arange(0, 2**15 - 1).to(torch.int16)
    lower, upper = patterns.view(DTYPES[dtype]), (patterns + 1).view(DTYPES[dtype])
    for x, y in ((lower, upper), (-lower, -upper)):
        finite = (x.float() + y.float()).isfinite()
        middle = native("avg", [x, y], isa)  # exactly between two neighbours: a tie each time
        even = torch.where(patterns % 2 == 0, x, y)
        assert same_bits(middle[finite], even[finite])
    shuffled = lower[torch.randperm(lower.numel(), generator=torch.Generator().manual_seed(0))]
    for op in ("sum", "prod"):
        assert same_bits(native(op, [lower, shuffled], isa), expected(op, [lower, shuffled]))


@pytest.mark.parametrize("isa", ISAS)
def test_halves_are_rounded_once(isa: str) -> None:
    parts = [torch.tensor([x], dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0)]
    assert native("sum", parts, isa).item() == 258  # rounded after each addition it would stay 256


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap(dtype: str, isa: str) -> None:
    info = torch.iinfo(DTYPES[dtype])
    low, high, one, two = (torch.full((37,), x, dtype=DTYPES[dtype]) for x in (info.min, info.max, 1, 2))
    assert native("sum", [high, one], isa).eq(info.min).all()
    assert native("sum", [low, -one, one, -one], isa).eq(info.max).all()
    assert native("prod", [high, two], isa).eq(info.max - 1 if info.min == 0 else -2).all()
    assert native("avg", [high, one], isa).eq(info.min // 2).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_average_truncates_for_any_number_of_sources(dtype: str, isa: str) -> None:
    info = torch.iinfo(DTYPES[dtype])
    for n in [*range(1, 40), 63, 64, 65, 100, *range(126, 131), *range(254, 259), 1000, 4095, 65537]:
        near = [sign * k * n + d for k in (0, 1, 2, info.max // n) for d in (-1, 0, 1) for sign in (1, -1)]
        edges = [info.min, info.min + 1, info.max, info.max - 1]
        numbers = range(info.min, info.max + 1) if info.bits == 8 else near + edges
        sums = torch.tensor([x for x in numbers if info.min <= x <= info.max], dtype=DTYPES[dtype])
        result, zeros = torch.empty_like(sums), torch.zeros_like(sums)
        addresses = [sums.data_ptr()] + [zeros.data_ptr()] * (n - 1)
        _native.reduce("avg", dtype, result.data_ptr(), addresses, sums.numel(), isa)
        assert torch.equal(result.long(), torch.div(sums.long(), n, rounding_mode="trunc")), f"n = {n}"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_of_two_equal_zeros_the_earlier_stays(dtype: str, isa: str) -> None:
    zeros, minus = torch.zeros(9, dtype=DTYPES[dtype]), -torch.zeros(9, dtype=DTYPES[dtype])
    for op in ("min", "max"):
        assert same_bits(native(op, [zeros, minus], isa), zeros)
        assert same_bits(native(op, [minus, zeros], isa), minus)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), combination=st.sampled_from(COMBINATIONS), n=st.integers(1, 6))
def test_same_bits_from_every_isa_and_in_every_slicing(
    data: st.DataObject, combination: tuple[str, str], n: int
) -> None:
    """What replicas rely on: who reduces which slice, and on which CPU, does not show in the result."""
    op, dtype = combination
    count = data.draw(st.integers(0, 200))
    size = count * torch.empty((), dtype=DTYPES[dtype]).element_size()
    raw = [bytearray(data.draw(st.binary(min_size=size, max_size=size))) for _ in range(n)]
    sources = [torch.frombuffer(b, dtype=DTYPES[dtype]) if b else torch.empty(0, dtype=DTYPES[dtype]) for b in raw]
    whole = native(op, sources)
    assert matches(op, whole, expected(op, sources))
    cut = data.draw(st.integers(0, count))
    for isa in ISAS:
        pieces = [native(op, [s[part] for s in sources], isa) for part in (slice(cut), slice(cut, None))]
        assert same_bits(torch.cat(pieces), whole), isa


def test_instruction_sets() -> None:
    assert ISAS[-1] == "baseline"
    assert len(set(ISAS)) == len(ISAS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "mean"}, "unknown op 'mean': choose one of sum, avg, min, max, prod, band, bor, bxor"),
        ({"dtype": "float32"}, "unknown dtype 'float32': choose one of f32, f64, bf16, f16, i32, i64, i8, u8, i16"),
        ({"isa": "mmx"}, f"this CPU cannot run isa 'mmx': choose one of {', '.join(ISAS)}"),
        *(({"dtype": dtype}, f"^{dtype} cannot be reduced$") for dtype in MOVED_ONLY),
        *(({"op": op}, f"^f32 cannot be reduced by {op}: it takes integers$") for op in BITWISE),
        ({"op": "bor", "dtype": "f16"}, "^f16 cannot be reduced by bor: it takes integers$"),
        ({"sources": []}, "sources is empty: a reduction needs at least one"),
        ({"count": -1}, "count is -1: it must be 0 or more"),
        ({"out": 0}, r"out is a null pointer \(count is 4\)"),
        ({"sources": [4096, 0]}, r"sources\[1\] is a null pointer \(count is 4\)"),
        ({"out": 4096, "sources": [4096, 4104]}, r"sources\[1\] overlaps out: it may be the same buffer or a separate"),
    ],
)
def test_wrong_arguments(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"op": "sum", "dtype": "f32", "out": 8192, "sources": [4096], "count": 4}
    with pytest.raises(ValueError, match=message):
        _native.reduce(**(arguments | change))  # type: ignore[arg-type]


def test_nothing_is_touched_when_count_is_zero() -> None:
    _native.reduce("sum", "f32", 0, [0, 0], 0)
