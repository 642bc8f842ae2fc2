"""The C prelude: functions against PyTorch in double precision, random numbers against closed forms."""

import ctypes
import math
import platform
import shutil

import numpy as np
import pytest
import torch
from torch.nn import functional

from cpomdp_ppl.native.compiler import compiled
from cpomdp_ppl.native.prelude import PARTS, prelude

# Compiling takes seconds.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")]

# Functions of one number, as PyTorch has them; and units in the last place that float32 may be off.
UNARY = {
    "exp": (torch.exp, 2),
    "log": (torch.log, 2),
    "log1p": (torch.log1p, 2),
    "expm1": (torch.expm1, 2),
    "sin": (torch.sin, 2),
    "cos": (torch.cos, 2),
    "tan": (torch.tan, 4),
    "tanh": (torch.tanh, 2),
    "sigmoid": (torch.sigmoid, 3),
    "softplus": (functional.softplus, 3),
    "logsigmoid": (functional.logsigmoid, 3),
    "atan": (torch.atan, 3),
    "asin": (torch.asin, 2),
    "acos": (torch.acos, 2),
    "sinh": (torch.sinh, 3),
    "cosh": (torch.cosh, 3),
    "erf": (torch.erf, 2),
    "erfc": (torch.erfc, 3),
    "erfinv": (torch.erfinv, 2),
    "ndtri": (torch.special.ndtri, 2),
    "lgamma": (torch.lgamma, 2),
    "digamma": (torch.digamma, 2),
    "sign": (torch.sign, 0),
    "round": (torch.round, 0),
}
BINARY = {
    "atan2": (torch.atan2, 3),
    "hypot": (torch.hypot, 1),
    "pow": (torch.pow, 2),
    "fmod": (torch.fmod, 0),
    "remainder": (torch.remainder, 0),
    "floor_div": (torch.floor_divide, 0),
    "min": (torch.minimum, 0),
    "max": (torch.maximum, 0),
}
INTEGER = ("i_floor_div", "i_remainder", "i_pow")
FILLERS = {
    "fill_words": np.uint32,
    "fill_bits": np.uint64,
    "fill_uniform": np.float32,
    "fill_uniform_d": np.float64,
    "fill_normal": np.float32,
    "fill_normal_d": np.float64,
}
SAMPLERS = {"draw_gamma": 1, "draw_beta": 2, "draw_poisson": 1, "draw_binomial": 2}
C_TYPES = {np.float32: "f32", np.float64: "f64", np.uint32: "u32", np.uint64: "u64", np.int64: "i64"}
SMALLEST = float(np.finfo(np.float32).tiny)
LANES = 16


def _loop(name: str, real: str, arguments: int) -> str:
    """A C function `all_name` that applies one to each element of arrays."""
    inputs = [f"const {real} *restrict {x}" for x in "ab"[:arguments]]
    head = ", ".join([*inputs, f"{real} *restrict out", "int n"])
    call = ", ".join(f"{x}[i]" for x in "ab"[:arguments])
    return f"void all_{name}({head}) {{ for (int i = 0; i < n; i++) out[i] = {name}({call}); }}\n"


def _source() -> str:
    text = prelude()
    for names, arguments in ((UNARY, 1), (BINARY, 2)):
        for name in names:
            text += _loop(f"m_{name}", "f32", arguments) + _loop(f"m_{name}_d", "f64", arguments)
    for name in INTEGER:
        text += _loop(name, "i64", 2)
    for name, kind in FILLERS.items():  # rows of n, each of a key; and from a state
        real, scratch = C_TYPES[kind], "" if name == "fill_words" else "scratch, "
        text += f"""
void rows_{name}(const u64 *keys, int rows, {real} *out, u32 *scratch, int n)
{{
    Rng rng;
    for (int i = 0; i < rows; i++) {{
        rng_begin(&rng, keys[i]);
        {name}(&rng, out + i * padded(n), {scratch} n);
    }}
    (void)scratch;
}}
void from_{name}(Rng *rng, {real} *out, u32 *scratch, int n)
{{
    {name}(rng, out, {scratch} n);
    (void)scratch;
}}
"""
    for name, parameters in SAMPLERS.items():
        given, passed = ", ".join(f"f64 {p}" for p in "ab"[:parameters]), ", ".join("ab"[:parameters])
        text += f"""
void all_{name}(const u64 *bits, {given}, f64 *out, int n)
{{
    for (int i = 0; i < n; i++) out[i] = {name}(bits[i], {passed});
}}
"""
    return (
        text
        + """
void states(const u64 *keys, Rng *out, int n) { for (int i = 0; i < n; i++) rng_begin(out + i, keys[i]); }
void keys_of(const u64 *a, u64 *out, int n)
{
    for (int i = 0; i < n; i++, a += 4) out[i] = key_of(a[0], a[1], a[2], a[3]);
}
void uniforms_of(const u64 *keys, f64 *out, int n)
{
    for (int i = 0; i < n; i++) out[i] = uniform_of(keys[i]);
}
void products(const f32 *a, const f32 *b, f32 *out, int n)
{
    unsigned was = denormals_off();
    for (int i = 0; i < n; i++) out[i] = a[i] * b[i];
    denormals_back(was);
    for (int i = n; i < 2 * n; i++) out[i] = a[i - n] * b[i - n];
}
"""
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPOMDP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield compiled(_source())


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def apply(library, name: str, *inputs: np.ndarray) -> np.ndarray:
    inputs = tuple(np.ascontiguousarray(x) for x in inputs)
    out = np.empty_like(inputs[0])
    library[f"all_{name}"](*map(pointer, inputs), pointer(out), ctypes.c_int(out.size))
    return out


def by_torch(function, *inputs: np.ndarray) -> np.ndarray:
    return function(*map(torch.from_numpy, inputs)).numpy()


def aligned(count: int, kind: type) -> np.ndarray:
    """An array on a boundary of 64 bytes."""
    size = np.dtype(kind).itemsize
    raw = np.empty(count + 64 // size, kind)
    start = (-raw.ctypes.data % 64) // size
    return raw[start : start + count]


def anything(seed: int, count: int = 400_000) -> np.ndarray:
    """Float32 numbers of every size and sign: all bits are random; half of them of a moderate size."""
    rng = np.random.default_rng(seed)
    wild = rng.integers(0, 2**32, count // 2, dtype=np.uint32).view(np.float32)
    return np.concatenate([wild[np.isfinite(wild)], rng.normal(0, 4, count // 2).astype(np.float32)])


def off(got: np.ndarray, true: np.ndarray) -> float:
    """Largest error in units in the last place; what is below 1.2e-38 may be taken for zero."""
    with np.errstate(all="ignore"):
        rounded = true.astype(np.float32)
        assert ((np.isnan(got) == np.isnan(true)) | (np.abs(true) < 1e-30)).all()
        limit = np.float64(np.finfo(np.float32).max)
        finite = np.isfinite(rounded) & np.isfinite(got)
        # What is infinite is so, up to the rounding of the largest numbers.
        other = ~finite & ~np.isnan(true)
        assert (np.abs(true[other]) > limit * (1 - 1e-6)).all()
        assert (np.sign(got[other]) == np.sign(true[other])).all()
        error = np.abs(got[finite].astype(np.float64) - true[finite])
        error[(np.abs(true[finite]) < SMALLEST) & (error < SMALLEST)] = 0
        return float((error / np.spacing(np.abs(rounded[finite])).astype(np.float64)).max())


# ---------------------------------------------------------------------------------------------- functions

NEAR_ONE = np.concatenate([np.linspace(0, 2, 100_001), 1 + np.geomspace(1e-7, 1, 1000)]).astype(np.float32)


@pytest.mark.parametrize("name", UNARY)
def test_float32_is_right_in_its_last_places(library, name):
    function, allowed = UNARY[name]
    x = np.concatenate([anything(1), NEAR_ONE, -NEAR_ONE])
    if name in ("sin", "cos", "tan"):
        x = x[np.abs(x) < 2**20]
    true = by_torch(function, x.astype(np.float64))
    assert off(apply(library, f"m_{name}", x), true) <= allowed + 0.5


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_angles_however_large_are_reduced(library, name):
    x = anything(2)
    x = x[np.abs(x) >= 2**20]
    assert np.abs(x).max() > 1e38
    true = by_torch(UNARY[name][0], x.astype(np.float64))
    assert np.abs(apply(library, f"m_{name}", x) - true).max() < 2e-9 + 2**-23


def test_tangents_of_large_angles(library):
    x = anything(2)
    x = x[np.abs(x) >= 2**20]
    true = by_torch(torch.tan, x.astype(np.float64))
    error = np.abs(apply(library, "m_tan", x) - true) / (1 + true**2)  # as an error of the angle
    assert error.max() < 2e-9 + 2**-22


@pytest.mark.parametrize("name", UNARY)
def test_float64_is_right(library, name):
    function = UNARY[name][0]
    x = np.concatenate([anything(3, 20_000).astype(np.float64), NEAR_ONE, -NEAR_ONE])
    got, true = apply(library, f"m_{name}_d", x), by_torch(function, x)
    # PyTorch's own digamma is no better than this beside a pole.
    np.testing.assert_allclose(got, true, rtol=1e-9 if name == "digamma" else 1e-13, atol=1e-15)


def test_float64_quantiles_undo_the_distribution(library):
    p = np.geomspace(1e-300, 0.5, 1000)
    x = apply(library, "m_ndtri_d", p)
    # d log p / dx is about -x in the tail: a relative error of 1e-15 of x shows x² times as large.
    back = np.array([0.5 * math.erfc(-t / math.sqrt(2)) for t in x])
    np.testing.assert_allclose(back, p, rtol=1e-12)
    y = np.concatenate([np.geomspace(1e-300, 0.5, 500), 1 - np.geomspace(1e-16, 0.5, 500)])
    np.testing.assert_allclose([math.erf(t) for t in apply(library, "m_erfinv_d", y)], y, rtol=1e-15 * 4)


@pytest.mark.parametrize("name", ["atan2", "hypot", "pow"])
def test_float32_of_two_numbers_is_right_in_its_last_places(library, name):
    function, allowed = BINARY[name]
    x, y = anything(4), anything(5)
    n = min(x.size, y.size)
    x, y = np.concatenate([x[:n], x[-n:]]), np.concatenate([y[:n], y[-n:]])
    true = by_torch(function, x.astype(np.float64), y.astype(np.float64))
    assert off(apply(library, f"m_{name}", x, y), true) <= allowed + 0.5


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_two_numbers_are_as_in_pytorch(library, name, kind):
    x, y = anything(6), anything(7)
    n = min(x.size, y.size)
    rng = np.random.default_rng(8)
    x = np.concatenate([x[:n], x[-n:], rng.integers(-50, 50, 10_000) / 4]).astype(kind)
    y = np.concatenate([y[:n], y[-n:], rng.integers(-9, 9, 10_000) / 4]).astype(kind)
    if name in ("fmod", "remainder", "floor_div"):  # PyTorch's own are NaN when a quotient is very large
        with np.errstate(divide="ignore", invalid="ignore"):
            moderate = np.abs(x.astype(np.float64) / y) < 2**60
        x, y = x[moderate], y[moderate]
    suffix = "_d" if kind is np.float64 else ""
    got, true = apply(library, f"m_{name}{suffix}", x, y), by_torch(BINARY[name][0], x, y)
    exact = BINARY[name][1] == 0
    eps = 0 if exact else 4 * float(np.finfo(kind).eps)
    np.testing.assert_allclose(got, true, rtol=eps, atol=0 if exact else float(np.finfo(kind).tiny))


def test_rests_are_exact_however_large_the_quotient(library):
    x, y = anything(9), anything(10)
    n = min(x.size, y.size)
    x, y = (
        np.concatenate([x[:n], x[:n], y[:n]]),
        np.concatenate([y[:n], x[:n][::-1], 1e-40 * y[:n]]).astype(np.float32),
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        assert (np.abs(x[y != 0].astype(np.float64) / y[y != 0]) > 2.0**250).any()
        np.testing.assert_array_equal(apply(library, "m_fmod", x, y), np.fmod(x, y))
        np.testing.assert_array_equal(apply(library, "m_remainder", x, y), np.remainder(x, y))


SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 2, -2, 0.5, -0.5, 1.5, 2.5, -3, 1e30, -1e30])


def assert_special(got: np.ndarray, true: np.ndarray) -> None:
    """Zeros, their signs, infinities, NaN and whole numbers are exact."""
    exact = ~np.isfinite(true) | ((true == np.round(true)) & (np.abs(true) < 1e6))
    np.testing.assert_array_equal(got[exact], true[exact])
    zero = true == 0
    np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(true[zero]))


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_special_values_are_those_of_pytorch(library, name, kind):
    x = SPECIAL.astype(kind)
    suffix = "_d" if kind is np.float64 else ""
    assert_special(apply(library, f"m_{name}{suffix}", x), by_torch(UNARY[name][0], x))


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_special_pairs_are_those_of_pytorch(library, name, kind):
    x, y = (np.ascontiguousarray(a.reshape(-1), kind) for a in np.meshgrid(SPECIAL, SPECIAL))
    suffix = "_d" if kind is np.float64 else ""
    got, true = apply(library, f"m_{name}{suffix}", x, y), by_torch(BINARY[name][0], x, y)
    if name in ("min", "max"):  # which of two zeros is the less is not said
        np.testing.assert_array_equal(got, true)
    else:
        assert_special(got, true)


def test_integers_divide_as_in_python(library):
    least = -(2**63)
    x, y = np.meshgrid(
        [*range(-12, 13), least, least + 1, 2**63 - 1], [-7, -3, -2, -1, 1, 2, 3, 7, least, 2**62]
    )
    x, y = (np.ascontiguousarray(a.reshape(-1), np.int64) for a in (x, y))

    def wrapped(values):
        return np.array([(value + 2**63) % 2**64 - 2**63 for value in values], np.int64)

    pairs = [(int(a), int(b)) for a, b in zip(x, y, strict=True)]
    np.testing.assert_array_equal(apply(library, "i_floor_div", x, y), wrapped(a // b for a, b in pairs))
    np.testing.assert_array_equal(apply(library, "i_remainder", x, y), wrapped(a % b for a, b in pairs))
    zero = np.zeros_like(x)
    assert not apply(library, "i_floor_div", x, zero).any()
    assert not apply(library, "i_remainder", x, zero).any()


def test_integers_have_powers_as_in_pytorch(library):
    x, n = (np.ascontiguousarray(a.reshape(-1)) for a in np.meshgrid(np.arange(-9, 10), np.arange(0, 70)))
    np.testing.assert_array_equal(apply(library, "i_pow", x, n), by_torch(torch.pow, x, n))
    x = np.arange(-3, 4)
    np.testing.assert_array_equal(apply(library, "i_pow", x, np.full(7, -3)), [0, 0, -1, 0, 1, 0, 0])


def test_smallest_numbers_are_zero_while_a_kernel_runs(library):
    x, out = np.full(4, 1e-30, np.float32), np.empty(8, np.float32)
    library["products"](pointer(x), pointer(np.full(4, 1e-10, np.float32)), pointer(out), 4)
    assert (out[4:] > 0).all(), "restored"
    if platform.machine() in ("x86_64", "AMD64", "aarch64", "arm64"):
        assert (out[:4] == 0).all()


# --------------------------------------------------------------------------------------- random numbers


def xoshiro(state: np.ndarray, steps: int) -> np.ndarray:
    """xoshiro128++ as published, for each lane: words of shape [steps, LANES]."""

    def rotl(x, k):
        return (x << np.uint32(k)) | (x >> np.uint32(32 - k))

    s, out = [row.copy() for row in state], []
    for _ in range(steps):
        out.append(rotl(s[0] + s[3], 7) + s[0])
        t = s[1] << np.uint32(9)
        s[2] ^= s[0]
        s[3] ^= s[1]
        s[1] ^= s[2]
        s[0] ^= s[3]
        s[2] ^= t
        s[3] = rotl(s[3], 11)
    return np.stack(out)


def filled(library, name: str, keys: np.ndarray, n: int) -> np.ndarray:
    """Rows of n numbers, each of a key: [rows, n]."""
    size = -(-n // 32) * 32
    out, scratch = aligned(len(keys) * size, FILLERS[name]), aligned(size, np.uint32)
    library[f"rows_{name}"](
        pointer(keys), ctypes.c_int(len(keys)), pointer(out), pointer(scratch), ctypes.c_int(n)
    )
    return out.reshape(len(keys), size)[:, :n]


def from_state(library, name: str, state: np.ndarray, n: int) -> np.ndarray:
    size = -(-n // 32) * 32
    own, out, scratch = aligned(4 * LANES, np.uint32), aligned(size, FILLERS[name]), aligned(size, np.uint32)
    own[:] = state.reshape(-1)
    library[f"from_{name}"](pointer(own), pointer(out), pointer(scratch), ctypes.c_int(n))
    return out


def some_state(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, (4, LANES), dtype=np.uint32)


def test_words_are_those_of_xoshiro(library):
    state = some_state(1)
    np.testing.assert_array_equal(
        from_state(library, "fill_words", state, 320), xoshiro(state, 20).reshape(-1)
    )


def test_numbers_are_made_of_words_as_documented(library):
    n, state = 320, some_state(2)
    first, second = xoshiro(state, 2 * n // LANES).reshape(2, n).astype(np.uint64)
    bits = first << np.uint64(32) | second
    np.testing.assert_array_equal(from_state(library, "fill_bits", state, n), bits)
    np.testing.assert_array_equal(
        from_state(library, "fill_uniform", state, n), (first >> np.uint64(8)).astype(np.float32) / 2**24
    )
    uniform = (bits >> np.uint64(11) | np.uint64(1)).astype(np.float64)
    np.testing.assert_array_equal(from_state(library, "fill_uniform_d", state, n) * 2**53, uniform)

    def box_muller(radius, angle):  # the sines of odd quadrants change places with the cosines
        turns = np.round(4 * angle)
        r, odd, sign = (4 * angle - turns) * np.pi / 2, turns % 2 == 1, np.where(turns // 2 % 2 == 1, -1, 1)
        length, c, s = np.sqrt(-2 * np.log(radius)) * sign, np.cos(r), np.sin(r)
        return np.concatenate([length * np.where(odd, s, c), length * np.where(odd, c, s)])

    u = (bits.astype(np.float64) + 0.5) * 2**-64.0
    np.testing.assert_allclose(
        from_state(library, "fill_normal_d", state, n), box_muller(u[: n // 2], u[n // 2 :]), atol=2e-14
    )
    quadrant, within = first >> np.uint64(30), (first << np.uint64(34)).astype(np.int64) / 2**64
    u = (first + 0.5) / 2**32
    np.testing.assert_allclose(
        from_state(library, "fill_normal", state, n),
        box_muller(u[: n // 2], (quadrant + within)[n // 2 :] / 4),
        atol=2e-6,
    )


@pytest.mark.parametrize(("word", "radius"), [(0, math.sqrt(66 * math.log(2))), (2**32 - 1, 0.0)])
def test_normals_of_extreme_words(library, word, radius):
    state = some_state(3)
    state[0], state[3] = 0, word  # the first word that these give
    x = from_state(library, "fill_normal", state, 32).reshape(2, 16).astype(np.float64)
    np.testing.assert_allclose(np.hypot(*x), radius, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", FILLERS)
@pytest.mark.parametrize("n", [1, 7, 31, 32, 33, 100])
def test_fillers_stay_within_their_arrays_and_repeat(library, name, n):
    size = -(-n // 32) * 32
    out, scratch = aligned(size + 64, FILLERS[name]), aligned(size + 64, np.uint32)
    out[:], scratch[:] = 7, 7
    key = np.array([5], np.uint64)
    library[f"rows_{name}"](pointer(key), 1, pointer(out), pointer(scratch), n)
    assert (out[size:] == 7).all()
    assert (scratch[size:] == 7).all()
    np.testing.assert_array_equal(out[:n], filled(library, name, key, n)[0])
    assert len(np.unique(out[:n])) == n


ROWS, LENGTH = 4096, 4096
COUNT = ROWS * LENGTH  # 1.7e7


@pytest.fixture(scope="module", params=["fill_normal", "fill_normal_d"])
def normals(request, library):
    """Of consecutive keys: were these alike, the tests below would show it."""
    return filled(library, request.param, np.arange(ROWS, dtype=np.uint64), LENGTH)


def upper(x: float) -> float:
    return 0.5 * math.erfc(x / math.sqrt(2))


def test_normals_have_the_moments_of_a_normal(normals):
    z = normals.astype(np.float64)
    square = z * z
    # Standard errors of the means of z, z², z³, z⁴; 4.5 of them are passed once in 10⁵ times.
    for power, value, mean, variance in (
        (1, z, 0, 1),
        (2, square, 1, 2),
        (3, square * z, 0, 15),
        (4, square * square, 3, 96),
    ):
        assert abs(value.mean() - mean) < 4.5 * math.sqrt(variance / COUNT), power


def test_normals_have_the_tails_of_a_normal(normals):
    for threshold in (1, 2, 3, 4, 4.5, 5):
        expected = COUNT * upper(threshold)
        for count in ((normals > threshold).sum(), (normals < -threshold).sum()):
            assert abs(count - expected) < 4.5 * math.sqrt(expected) + 1, threshold


def ks(draws: np.ndarray, cdf: np.ndarray) -> float:
    """√n times the Kolmogorov–Smirnov distance of sorted draws; above 2.3 once in 20,000 times."""
    n = len(draws)
    last = np.searchsorted(draws, draws, "right") / n
    first = np.searchsorted(draws, draws, "left") / n
    return math.sqrt(n) * float(max(np.abs(last - cdf).max(), np.abs(first - cdf).max()))


def test_normals_are_distributed_as_a_normal(normals):
    z = np.sort(normals.reshape(-1)).astype(np.float64)
    cdf = torch.special.ndtr(torch.from_numpy(z)).numpy()
    n = np.arange(COUNT)
    distance = max(np.abs((n + 1) / COUNT - cdf).max(), np.abs(n / COUNT - cdf).max())
    assert math.sqrt(COUNT) * distance < 2.3


def assert_uncorrelated(x: np.ndarray, y: np.ndarray, what: object) -> None:
    """Of centred numbers of variance 1; the standard error of their mean product is 1 / √n."""
    assert abs(np.vdot(x, y)) < 4.5 * math.sqrt(x.size), what


def assert_independent(z: np.ndarray) -> None:
    """Rows are keys; places within a row go through the lanes."""
    for lag in (1, 2, 3, 5, 8, 15, 16, 17, 32, 256, LENGTH // 2):
        assert_uncorrelated(z[:, :-lag], z[:, lag:], f"places {lag} apart")
    for lag in (1, 2, 3, 4, 16, 256, 1024):
        assert_uncorrelated(z[:-lag], z[lag:], f"keys {lag} apart")


def test_normals_are_independent(normals):
    z = normals.astype(np.float64)
    assert_independent(z)
    assert_independent((z * z - 1) / math.sqrt(2))


@pytest.mark.parametrize("name", ["fill_uniform", "fill_uniform_d"])
@pytest.mark.parametrize("shift", [0, 32, 52])
def test_uniforms_are_uniform_and_independent(library, name, shift):
    keys = np.arange(ROWS, dtype=np.uint64) << np.uint64(shift)
    u = filled(library, name, keys, LENGTH)
    assert u.min() >= 0
    assert u.max() < 1
    assert name == "fill_uniform" or u.min() > 0
    u = u.astype(np.float64)
    for scale in (1, 2**10):  # the first bits, and some of the middle
        counts = np.bincount((u * scale % 1 * 1024).astype(np.int64).reshape(-1), minlength=1024)
        chi_square = ((counts - COUNT / 1024) ** 2).sum() / (COUNT / 1024)
        assert abs(chi_square - 1023) < 4.5 * math.sqrt(2 * 1023)
    pairs = np.bincount(((u[:, ::2] * 32).astype(int) * 32 + (u[:, 1::2] * 32).astype(int)).reshape(-1))
    assert abs(((pairs - COUNT / 2048) ** 2).sum() / (COUNT / 2048) - 1023) < 4.5 * math.sqrt(2 * 1023)
    assert_independent((u - 0.5) * math.sqrt(12))


def bits_of(words: np.ndarray) -> np.ndarray:
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1)


def assert_half_of_the_bits_change(one: np.ndarray, other: np.ndarray, what: object) -> None:
    """Each bit changes half of the time: 6 standard errors, for there are a hundred thousand bits in all."""
    share = (bits_of(one) ^ bits_of(other)).mean(0)
    assert np.abs(share - 0.5).max() < 6 * 0.5 / math.sqrt(len(one)), what


def test_every_bit_of_a_key_changes_every_bit_of_the_state(library):
    keys = np.random.default_rng(4).integers(0, 2**64, 2000, dtype=np.uint64)

    def states(keys):
        out = np.empty((len(keys), 4 * LANES), np.uint32)
        library["states"](pointer(keys), pointer(out), ctypes.c_int(len(keys)))
        return out

    before = states(keys)
    for bit in range(64):
        assert_half_of_the_bits_change(before, states(keys ^ np.uint64(1 << bit)), bit)
    small = np.arange(2000, dtype=np.uint64)  # keys that are nearly all zeros
    for shift in (0, 21, 32, 53):
        plain = states(small << np.uint64(shift))
        assert np.abs(bits_of(plain).mean(0) - 0.5).max() < 6 * 0.5 / math.sqrt(2000)
        lanes = plain.reshape(-1, 4, LANES)
        assert lanes.any(1).all()
        assert len(np.unique(lanes.transpose(0, 2, 1).reshape(-1, 4), axis=0)) == 2000 * LANES


def test_keys_depend_on_every_bit_of_what_they_are_made_of(library):
    def keys_of(parts):
        out = np.empty(len(parts), np.uint64)
        library["keys_of"](pointer(np.ascontiguousarray(parts)), pointer(out), ctypes.c_int(len(parts)))
        return out

    parts = np.random.default_rng(5).integers(0, 100, (2000, 4)).astype(np.uint64)
    before = keys_of(parts)[:, None]
    for place in range(4):
        for bit in range(0, 64, 7):
            changed = parts.copy()
            changed[:, place] ^= np.uint64(1 << bit)
            assert_half_of_the_bits_change(before, keys_of(changed)[:, None], (place, bit))
    grid = np.stack(np.meshgrid(*[np.arange(24, dtype=np.uint64)] * 4), -1).reshape(-1, 4)
    assert len(np.unique(keys_of(grid))) == 24**4


def test_one_uniform_of_a_key(library):
    keys, u = np.arange(200_000, dtype=np.uint64), np.empty(200_000)
    library["uniforms_of"](pointer(keys), pointer(u), ctypes.c_int(len(keys)))
    assert u.min() >= 0
    assert u.max() < 1
    assert ks(np.sort(u), np.sort(u)) < 2.3
    assert_uncorrelated((u[1:] - 0.5) * math.sqrt(12), (u[:-1] - 0.5) * math.sqrt(12), "consecutive keys")


# ------------------------------------------------------------------------------------------------ samplers

DRAWS = 200_000


def draws(library, name: str, *parameters: float, count: int = DRAWS) -> np.ndarray:
    """Of consecutive bits, as no generator would give them."""
    bits, out = np.arange(count, dtype=np.uint64), np.empty(count)
    given = [ctypes.c_double(parameter) for parameter in parameters]
    library[f"all_{name}"](pointer(bits), *given, pointer(out), ctypes.c_int(count))
    return out


@pytest.mark.parametrize("a", [1e-3, 0.05, 0.5, 0.999, 1.0, 2.5, 40.0, 1e4])
def test_gammas_are_distributed_as_a_gamma(library, a):
    x = np.sort(draws(library, "draw_gamma", a))
    cdf = torch.special.gammainc(torch.full((DRAWS,), a, dtype=torch.float64), torch.from_numpy(x)).numpy()
    seen = x > 1e-300  # smaller ones are zero, perhaps
    n = np.arange(DRAWS)[seen]
    distance = max(np.abs((n + 1) / DRAWS - cdf[seen]).max(), np.abs(n / DRAWS - cdf[seen]).max())
    assert math.sqrt(DRAWS) * distance < 2.3


def test_large_gammas_are_nearly_normal(library):
    a = 1e14
    z = np.sort((draws(library, "draw_gamma", a) - a) / math.sqrt(a))
    assert ks(z, torch.special.ndtr(torch.from_numpy(z)).numpy()) < 2.3


BETAS = {  # those with a distribution function in closed form
    (1.0, 3.0): lambda x: 1 - (1 - x) ** 3,
    (2.5, 1.0): lambda x: x**2.5,
    (0.5, 0.5): lambda x: 2 / np.pi * np.arcsin(np.sqrt(x)),
    (2.0, 2.0): lambda x: x * x * (3 - 2 * x),
    (0.1, 1.0): lambda x: x**0.1,
    (1.0, 0.25): lambda x: 1 - (1 - x) ** 0.25,
}


@pytest.mark.parametrize(("a", "b"), BETAS)
def test_betas_are_distributed_as_a_beta(library, a, b):
    x = np.sort(draws(library, "draw_beta", a, b))
    x = x[x < 1]  # 1 - 1e-17 is 1
    assert len(x) > 0.99 * DRAWS or b == 0.25
    cdf, n = BETAS[a, b](x), np.arange(len(x))
    assert math.sqrt(DRAWS) * max(np.abs((n + 1) / DRAWS - cdf).max(), np.abs(n / DRAWS - cdf).max()) < 2.3


@pytest.mark.parametrize(
    ("a", "b"), [(1e-3, 2e-3), (1e-310, 3e-310), (0.01, 5.0), (300.0, 700.0), (1e12, 1e12)]
)
def test_betas_have_the_moments_of_a_beta(library, a, b):
    x, mean = draws(library, "draw_beta", a, b), a / (a + b)
    variance = mean * (1 - mean) / (a + b + 1)
    assert abs(x.mean() - mean) < 4.5 * math.sqrt(variance / DRAWS)
    spread = ((x - mean) ** 2).std() / math.sqrt(DRAWS)
    assert abs(((x - mean) ** 2).mean() - variance) < 4.5 * spread


def assert_probabilities(
    x: np.ndarray, distribution: torch.distributions.Distribution, low: int, high: int
) -> None:
    """A χ² test against probabilities of whole numbers, those with few expected draws taken together."""
    assert (x == np.round(x)).all()
    expected = distribution.log_prob(torch.arange(low, high + 1, dtype=torch.float64)).exp().numpy() * len(x)
    observed = np.bincount(
        np.clip(x, low - 1, high + 1).astype(np.int64) - low + 1, minlength=high - low + 3
    )[1:-1]
    common = expected >= 10
    seen = np.append(observed[common], len(x) - observed[common].sum())
    wanted = np.append(expected[common], len(x) - expected[common].sum())
    if wanted[-1] < 5:
        assert seen[-1] < 25
        seen, wanted = seen[:-1], wanted[:-1]
    chi_square, freedom = ((seen - wanted) ** 2 / wanted).sum(), max(len(seen) - 1, 1)
    assert chi_square < freedom + 4.5 * math.sqrt(2 * freedom) + 10


@pytest.mark.parametrize("rate", [1e-3, 0.7, 5.0, 9.99, 10.0, 10.5, 30.0, 200.0, 5000.0])
def test_poissons_have_their_probabilities(library, rate):
    distribution = torch.distributions.Poisson(torch.tensor(rate, dtype=torch.float64))
    width = 8 * math.sqrt(rate) + 10
    x = draws(library, "draw_poisson", rate, count=5_000_000)
    assert_probabilities(x, distribution, max(0, int(rate - width)), int(rate + width))


BINOMIALS = [
    (1, 0.3),
    (7, 0.5),
    (20, 0.9),
    (30, 1e-3),
    (10**6, 3e-6),
    (21, 0.48),
    (100, 0.1),
    (100, 0.7),
    (5000, 0.4),
]


@pytest.mark.parametrize(("n", "p"), BINOMIALS)
def test_binomials_have_their_probabilities(library, n, p):
    distribution = torch.distributions.Binomial(n, torch.tensor(p, dtype=torch.float64))
    x = draws(library, "draw_binomial", n, p, count=5_000_000)
    assert x.min() >= 0
    assert x.max() <= n
    width = 8 * math.sqrt(n * p * (1 - p)) + 10
    assert_probabilities(x, distribution, max(0, int(n * p - width)), min(n, int(n * p + width)))


@pytest.mark.parametrize(
    ("name", "parameters", "mean", "variance"),
    [
        ("draw_poisson", (1e12,), 1e12, 1e12),
        ("draw_poisson", (1e15,), 1e15, 1e15),
        ("draw_binomial", (1e13, 0.3), 3e12, 2.1e12),
        ("draw_binomial", (1e15, 1e-4), 1e11, 1e11 * (1 - 1e-4)),
    ],
)
def test_large_counts_are_nearly_normal(library, name, parameters, mean, variance):
    z = np.sort((draws(library, name, *parameters) - mean) / math.sqrt(variance))
    assert ks(z, torch.special.ndtr(torch.from_numpy(z)).numpy()) < 2.3


@pytest.mark.parametrize(
    ("name", "parameters", "value"),
    [
        ("draw_poisson", (0.0,), 0),
        ("draw_binomial", (0, 0.5), 0),
        ("draw_binomial", (9, 0.0), 0),
        ("draw_binomial", (9, 1.0), 9),
        ("draw_binomial", (2**60, 1.0), 2**60),
        ("draw_binomial", (9, 1e-320), 0),
        *(("draw_gamma", (a,), math.nan) for a in (math.nan, 0.0, -1.0, math.inf)),
        *(("draw_beta", ab, math.nan) for ab in ((math.nan, 1.0), (1.0, math.nan), (0.0, 1.0), (1.0, -1.0))),
        ("draw_beta", (math.inf, 1.0), math.nan),
        *(("draw_poisson", (rate,), math.nan) for rate in (math.nan, -1.0, math.inf)),
        *(("draw_binomial", (n, 0.5), math.nan) for n in (math.nan, -1.0, 2.5, math.inf)),
        *(("draw_binomial", (9, p), math.nan) for p in (math.nan, -0.1, 1.1)),
    ],
)
def test_edges_of_the_parameters(library, name, parameters, value):
    np.testing.assert_array_equal(draws(library, name, *parameters, count=1000), np.full(1000, value))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("draw_gamma", (1e300,)),
        ("draw_gamma", (5e-324,)),
        ("draw_beta", (1e300, 1e300)),
        ("draw_beta", (5e-324, 1e300)),
        ("draw_poisson", (1e300,)),
        ("draw_poisson", (5e-324,)),
        ("draw_binomial", (1e300, 0.5)),
        ("draw_binomial", (1e300, 1e-300)),
    ],
)
def test_extreme_parameters_give_numbers(library, name, parameters):
    assert np.isfinite(draws(library, name, *parameters, count=1000)).all()


def test_the_parts_are_all_there():
    assert all(mark in prelude() for mark in ("typedef float f32", "m_exp", "rng_begin", "draw_gamma"))
    assert len(PARTS) == 4
