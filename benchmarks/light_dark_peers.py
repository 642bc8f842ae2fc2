"""Peer implementations of one job: bootstrap particle filters of the Light-Dark model, on one thread.

Every peer is a function ``f(actions, observations, num_particles, seed)`` of ``actions`` [B, T] (int64;
0 left, 1 right, 2 observe) and ``observations`` [B, T] (float32; read only where the action is 2). It returns
``(log_likelihood [B, C], increments [B, T, C], expected_reward [B, T, C], ess [B, T, C])`` as float64 arrays,
for the C = 2 contexts. ``expected_reward`` is taken before the move of its step, ``ess`` after the weighting
of its step and before any resampling. Resampling is systematic, per row, when the ESS is below half of the
particles.
"""

from __future__ import annotations

import math
import os
from functools import partial
from typing import TYPE_CHECKING

# One thread for every peer; these have to be set before the libraries are imported.
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
for _name in ("NPROC", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ[_name] = "1"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import particles  # noqa: E402
import pyro  # noqa: E402
import pyro.distributions as dist  # noqa: E402
import torch  # noqa: E402
from numba import njit  # noqa: E402
from particles import collectors  # noqa: E402
from particles import distributions as dists  # noqa: E402
from particles import state_space_models as ssm  # noqa: E402
from pyro.infer import SMCFilter  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

Result = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]

OBSERVE = 2
MOVES = (-1.0, 1.0, 0.0)
CONTEXTS = 2
INITIAL_SD = 0.3
MOVE_SD = math.sqrt(0.1)
LIGHT_VARIANCE = 1.0
DARK_VARIANCE = 8.0
ESS_FRACTION = 0.5


# ------------------------------------------------------------------------------------------------------------
# 1. Numba
# ------------------------------------------------------------------------------------------------------------

_LANES = (
    16  # parallel xoshiro128+ streams, so that the compiler turns the inner loop into vector instructions
)
_F = np.float32
_I = np.int32
_U = np.uint32
_MOVES = np.array(MOVES, dtype=np.float32)


@njit(fastmath=True, cache=False)
def _exp(x: np.float32) -> np.float32:
    """exp(x) for x <= 0 in float32 (Cephes polynomial): unlike math.exp, it vectorises without SVML."""
    x = max(x, _F(-87.0))
    n = _I(x * _F(1.44269504088896341) - _F(0.5))
    r = x - _F(n) * _F(0.693147180559945)
    p = _F(1.9875691500e-4)
    p = p * r + _F(1.3981999507e-3)
    p = p * r + _F(8.3334519073e-3)
    p = p * r + _F(4.1665795894e-2)
    p = p * r + _F(1.6666665459e-1)
    p = p * r + _F(5.0000001201e-1)
    return (p * r * r + r + _F(1.0)) * _I(_I(n + _I(127)) << _I(23)).view(np.float32)


@njit(fastmath=True, cache=False)
def _log(x: np.float32) -> np.float32:
    """log(x) for normal positive x in float32 (Cephes polynomial)."""
    bits = _F(x).view(np.int32)
    e = _I(_I(bits - _I(0x3F3504F3)) >> _I(23))
    m = _I(bits - _I(e << _I(23))).view(np.float32) - _F(1.0)
    p = _F(7.0376836292e-2)
    p = p * m + _F(-1.1514610310e-1)
    p = p * m + _F(1.1676998740e-1)
    p = p * m + _F(-1.2420140846e-1)
    p = p * m + _F(1.4249322787e-1)
    p = p * m + _F(-1.6668057665e-1)
    p = p * m + _F(2.0000714765e-1)
    p = p * m + _F(-2.4999993993e-1)
    p = p * m + _F(3.3333331174e-1)
    return m + m * m * (p * m - _F(0.5)) + _F(e) * _F(0.693147180559945)


@njit(cache=False)
def _seed_xoshiro(seed: int) -> np.ndarray:
    """The states of the xoshiro128+ lanes, filled by splitmix64."""
    state = np.empty((4, _LANES), dtype=np.uint32)
    z = np.uint64(seed)
    for i in range(4):
        for lane in range(_LANES):
            z += np.uint64(0x9E3779B97F4A7C15)
            v = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            v = (v ^ (v >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state[i, lane] = _U((v ^ (v >> np.uint64(31))) >> np.uint64(32))
    return state


@njit(fastmath=True, cache=False)
def _normals_numpy(out: np.ndarray, n: int, bits: np.ndarray, state: np.ndarray) -> None:
    """Fill out[:n] with np.random.standard_normal (Numba's own generator)."""
    for i in range(n):
        out[i] = np.random.standard_normal()


@njit(fastmath=True, cache=False)
def _normals_xoshiro(out: np.ndarray, n: int, bits: np.ndarray, state: np.ndarray) -> None:
    """Fill all of out (a multiple of 2 * _LANES entries) with xoshiro128+ and Box-Muller, vectorised."""
    s0, s1, s2, s3 = state[0], state[1], state[2], state[3]
    for k in range(0, bits.size, _LANES):
        for j in range(_LANES):
            a, b, c, d = s0[j], s1[j], s2[j], s3[j]
            bits[k + j] = a + d
            t = _U(b << _U(9))
            c = _U(c ^ a)
            d = _U(d ^ b)
            s1[j] = b ^ c
            s0[j] = a ^ d
            s2[j] = c ^ t
            s3[j] = _U(d << _U(11)) | _U(d >> _U(21))
    half = out.size // 2
    for i in range(half):
        radius = math.sqrt(_F(-2.0) * _log((_F(_I(bits[i] >> _U(8))) + _F(0.5)) * _F(2.0**-24)))
        a = _F(_I(bits[half + i])) * _F(math.pi * 2.0**-32)  # half the angle, in [-pi/2, pi/2)
        q = a * a
        s = q * (_F(1 / 120) + q * (_F(-1 / 5040) + q * (_F(1 / 362880) + q * _F(-1 / 39916800))))
        s = a * (_F(1.0) + q * (_F(-1 / 6) + s))
        c = _F(-1 / 720) + q * (_F(1 / 40320) + q * (_F(-1 / 3628800) + q * _F(1 / 479001600)))
        c = _F(1.0) + q * (_F(-0.5) + q * (_F(1 / 24) + q * c))
        out[i] = radius * (_F(1.0) - _F(2.0) * s * s)
        out[half + i] = radius * _F(2.0) * s * c


@njit(fastmath=True, cache=False)
def _resample(x: np.ndarray, w: np.ndarray, total: float, spare: np.ndarray, mark: np.ndarray) -> None:
    """Systematic resampling of x by unnormalised weights w, in place, without data-dependent branches."""
    n = x.size
    mark[:] = 0
    scale, u = n / total, np.random.random()
    cumulated, start = 0.0, 0
    for i in range(n):
        mark[start] = i  # of the particles that start here, the last one is the only one with offspring
        cumulated += w[i]
        start = min(_I(cumulated * scale + u), n)
    ancestor = _I(0)
    for i in range(n):
        ancestor = max(ancestor, mark[i])
        spare[i] = x[ancestor]
    x[:] = spare


@njit(fastmath=True, cache=False)
def _numba_rows(
    actions: np.ndarray, observations: np.ndarray, n: int, seed: int, normals: Callable
) -> Result:
    """Filter row after row, with fused loops over particles; unobserved steps do no work on weights."""
    b_size, t_size = actions.shape
    shape = (b_size, t_size, CONTEXTS)
    log_likelihood = np.zeros((b_size, CONTEXTS))
    increments, reward, ess = np.zeros(shape), np.empty(shape), np.empty(shape)
    padded = -(-n // (2 * _LANES)) * 2 * _LANES
    noise, bits = np.empty(padded, np.float32), np.empty(padded, np.uint32)
    x, lw = np.empty(n, np.float32), np.empty(n, np.float32)
    w, spare = np.empty(n, np.float32), np.empty(n, np.float32)
    mark = np.empty(n + 1, np.int32)
    np.random.seed(seed)
    state = _seed_xoshiro(seed)
    light, dark = _F(-0.5 / LIGHT_VARIANCE), _F(-0.5 / DARK_VARIANCE)
    log_light = _F(-0.5 * math.log(2.0 * math.pi * LIGHT_VARIANCE))
    log_dark = _F(-0.5 * math.log(2.0 * math.pi * DARK_VARIANCE))
    for b in range(b_size):
        for c in range(CONTEXTS):
            sign = _F(1 - 2 * c)
            normals(noise, n, bits, state)
            for i in range(n):
                x[i] = _F(INITIAL_SD) * noise[i]
            lw[:] = _F(0.0)
            w[:] = _F(1.0)
            log_total, total, row_ess = math.log(n), float(n), float(n)
            for t in range(t_size):
                expected = _F(0.0)
                if actions[b, t] != OBSERVE:
                    move = _MOVES[actions[b, t]]
                    normals(noise, n, bits, state)
                    for i in range(n):
                        y = sign * x[i]
                        expected += w[i] * (_F(y > _F(1.0)) - _F(y < _F(0.0)))
                        x[i] += move + _F(MOVE_SD) * noise[i]
                    reward[b, t, c], ess[b, t, c] = expected / total, row_ess
                    continue
                # The log-weights are negative, so the largest has the least bits: an integer minimum
                # vectorises, while LLVM does not see this float maximum as a reduction.
                z, least = observations[b, t], _I(0)
                for i in range(n):
                    y, error = sign * x[i], z - x[i]
                    expected += w[i] * (_F(y > _F(1.0)) - _F(y < _F(0.0)))
                    is_light = y > _F(0.0)
                    lw[i] += (log_light if is_light else log_dark) + (
                        light if is_light else dark
                    ) * error * error
                    least = min(least, _F(lw[i]).view(np.int32))
                reward[b, t, c], top = expected / total, _I(least).view(np.float32)
                s1, s2 = _F(0.0), _F(0.0)
                for i in range(n):
                    v = _exp(lw[i] - top)
                    w[i] = v
                    s1 += v
                    s2 += v * v
                total = float(s1)
                increments[b, t, c] = top + math.log(total) - log_total
                log_likelihood[b, c] += increments[b, t, c]
                log_total = top + math.log(total)
                row_ess = total * total / s2
                ess[b, t, c] = row_ess
                if row_ess < ESS_FRACTION * n:
                    _resample(x, w, total, spare, mark)
                    lw[:] = _F(0.0)
                    w[:] = _F(1.0)
                    log_total, total, row_ess = math.log(n), float(n), float(n)
    return log_likelihood, increments, reward, ess


def numba_filter(actions: np.ndarray, observations: np.ndarray, num_particles: int, seed: int) -> Result:
    """Hand-written Numba loops; the noise is from Numba's own np.random.standard_normal."""
    return _numba_rows(actions, observations, num_particles, seed, _normals_numpy)


def numba_filter_fast_rng(
    actions: np.ndarray, observations: np.ndarray, num_particles: int, seed: int
) -> Result:
    """The same loops; the noise is from a hand-written, vectorised xoshiro128+ with Box-Muller in float32."""
    return _numba_rows(actions, observations, num_particles, seed, _normals_xoshiro)


# ------------------------------------------------------------------------------------------------------------
# 2. JAX
# ------------------------------------------------------------------------------------------------------------

_BLOCK = 32
_A = jax.Array


def _jax_cumsum(v: _A) -> _A:
    """Cumulative sum of v [N], by blocks with a triangular product: on a CPU faster than jnp.cumsum."""
    n = v.shape[0]
    blocks = jnp.pad(v, (0, -n % _BLOCK)).reshape(-1, _BLOCK) @ jnp.triu(jnp.ones((_BLOCK, _BLOCK), v.dtype))
    ends = jnp.cumsum(blocks[:, -1])
    return (blocks + (ends - blocks[:, -1])[:, None]).reshape(-1)[:n]


def _jax_resample(x: _A, w: _A, u: _A) -> _A:
    """Systematic resampling of one row x [N] by normalised weights w [N] with one uniform u."""
    n = x.shape[0]
    ends = jnp.floor(_jax_cumsum(w) * n + u).astype(jnp.int32)
    passed = jnp.zeros(n, jnp.float32).at[ends].add(1.0, mode="drop")
    index = jnp.minimum(_jax_cumsum(passed).astype(jnp.int32), n - 1)
    return x.at[index].get(mode="promise_in_bounds")


def _jax_reward(x: _A, lw: _A, sign: _A) -> _A:
    """The expected reward of one row under normalised log-weights lw."""
    y = sign * x
    return jnp.sum(jnp.exp(lw) * ((y > 1.0).astype(jnp.float32) - (y < 0.0)))


def _jax_log_density(z: _A, x: _A, sign: _A) -> _A:
    """The log-density of the observation z for every particle of one row."""
    is_light = sign * x > 0.0
    half_precision = jnp.where(is_light, 0.5 / LIGHT_VARIANCE, 0.5 / DARK_VARIANCE)
    log_norm = jnp.where(
        is_light, math.log(2.0 * math.pi * LIGHT_VARIANCE), math.log(2.0 * math.pi * DARK_VARIANCE)
    )
    return -half_precision * (z - x) ** 2 - 0.5 * log_norm


def _jax_normalise(lw: _A) -> tuple[_A, _A, _A]:
    """The weights normalised, the log of their sum, and their ESS."""
    top = jnp.max(lw)
    w = jnp.exp(lw - top)
    total = jnp.sum(w)
    return w / total, top + jnp.log(total), total**2 / jnp.sum(w * w)


def _jax_row_step(x: _A, lw: _A, noise: _A, u: _A, action: _A, z: _A, sign: _A) -> tuple[_A, ...]:
    """One step of one row, without branches: reward, move, weighting, resampling where the ESS is low."""
    n = x.shape[0]
    observed = action == OBSERVE
    reward = _jax_reward(x, lw, sign)
    x = x + jnp.asarray(MOVES, jnp.float32)[action] + jnp.where(observed, 0.0, MOVE_SD) * noise
    lw = lw + jnp.where(observed, _jax_log_density(z, x, sign), 0.0)
    w, increment, ess = _jax_normalise(lw)
    low = ess < ESS_FRACTION * n
    x = jnp.where(low, _jax_resample(x, w, u), x)
    lw = jnp.where(low, -math.log(n), lw - increment)
    return x, lw, jnp.where(observed, increment, 0.0), reward, ess


@partial(jax.jit, static_argnames="n")
def _jax_vmapped(actions: _A, observations: _A, seed: _A, n: int) -> tuple[_A, ...]:
    """Scan over time the step that is mapped over contexts and episodes; outputs [T, C, B]."""
    rows = (CONTEXTS, actions.shape[0])
    signs = jnp.asarray([1.0, -1.0], jnp.float32)
    over_episodes = jax.vmap(_jax_row_step, in_axes=(0, 0, 0, 0, 0, 0, None))
    over_contexts = jax.vmap(over_episodes, in_axes=(0, 0, 0, 0, None, None, 0))

    def step(carry: tuple[_A, ...], inputs: tuple[_A, ...]) -> tuple[tuple, tuple]:
        """One time step of every row."""
        x, lw, key = carry
        key, noise_key, uniform_key = jax.random.split(key, 3)
        noise, u = jax.random.normal(noise_key, (*rows, n)), jax.random.uniform(uniform_key, rows)
        x, lw, *outputs = over_contexts(x, lw, noise, u, *inputs, signs)
        return (x, lw, key), tuple(outputs)

    key, initial_key = jax.random.split(jax.random.key(seed))
    x = INITIAL_SD * jax.random.normal(initial_key, (*rows, n))
    lw = jnp.full((*rows, n), -math.log(n), jnp.float32)
    return jax.lax.scan(step, (x, lw, key), (actions.T, observations.T))[1]


def jax_filter(actions: np.ndarray, observations: np.ndarray, num_particles: int, seed: int) -> Result:
    """JAX on the CPU: jitted once per shape, mapped over contexts and episodes, scanned over time.

    The noise is threefry's, on a CPU the fastest of JAX's generators. Under vmap every row pays for noise,
    weighting and resampling at every step.
    """
    outputs = _jax_vmapped(actions.astype(np.int32), observations, seed, num_particles)
    increments, reward, ess = (np.asarray(v, dtype=np.float64).transpose(2, 0, 1) for v in outputs)
    return increments.sum(1), increments, reward, ess


@partial(jax.jit, static_argnames="n")
def _jax_looped(actions: _A, observations: _A, seed: _A, n: int) -> tuple[_A, ...]:
    """Loop over contexts and episodes, scan over time, and branch in every step; outputs [C, B, T]."""
    b_size, t_size = actions.shape
    uniform = jnp.full(n, -math.log(n), jnp.float32)

    def row(sign: _A, action: _A, z: _A, key: _A) -> tuple[_A, ...]:
        """Filter one row."""

        def move(x: _A, lw: _A, ess: _A, action: _A, z: _A, key: _A) -> tuple[_A, ...]:
            """Move with noise; the weights stay."""
            x = x + jnp.asarray(MOVES, jnp.float32)[action] + MOVE_SD * jax.random.normal(key, (n,))
            return x, lw, ess, 0.0, ess

        def observe(x: _A, lw: _A, ess: _A, action: _A, z: _A, key: _A) -> tuple[_A, ...]:
            """Weight, and resample if the ESS is low."""
            lw = lw + _jax_log_density(z, x, sign)
            w, increment, ess = _jax_normalise(lw)
            x, lw, next_ess = jax.lax.cond(
                ess < ESS_FRACTION * n,
                lambda: (_jax_resample(x, w, jax.random.uniform(key)), uniform, jnp.float32(n)),
                lambda: (x, lw - increment, ess),
            )
            return x, lw, next_ess, increment, ess

        def step(carry: tuple[_A, ...], inputs: tuple[_A, ...]) -> tuple[tuple, tuple]:
            """One time step of the row."""
            reward = _jax_reward(*carry[:2], sign)
            x, lw, next_ess, increment, ess = jax.lax.cond(
                inputs[0] == OBSERVE, observe, move, *carry, *inputs
            )
            return (x, lw, next_ess), (increment, reward, ess)

        keys = jax.random.split(key, t_size + 1)
        x = INITIAL_SD * jax.random.normal(keys[0], (n,))
        return jax.lax.scan(step, (x, uniform, jnp.float32(n)), (action, z, keys[1:]))[1]

    keys = jax.random.split(jax.random.key(seed), (CONTEXTS, b_size))
    signs = jnp.asarray([1.0, -1.0], jnp.float32)
    return jax.lax.map(
        lambda context: jax.lax.map(
            lambda episode: row(context[0], *episode), (actions, observations, context[1])
        ),
        (signs, keys),
    )


def jax_filter_looped(actions: np.ndarray, observations: np.ndarray, num_particles: int, seed: int) -> Result:
    """JAX as in jax_filter, but with lax.map over rows and lax.cond to skip work a step does not need."""
    outputs = _jax_looped(actions.astype(np.int32), observations, seed, num_particles)
    increments, reward, ess = (np.asarray(v, dtype=np.float64).transpose(1, 2, 0) for v in outputs)
    return increments.sum(1), increments, reward, ess


# ------------------------------------------------------------------------------------------------------------
# 3. particles (N. Chopin)
# ------------------------------------------------------------------------------------------------------------


class _LightDark(ssm.StateSpaceModel):
    """Light-Dark in one context; X_0 is the state before the first action and Y_0 is missing."""

    default_params = {"sign": 1.0, "actions": None}

    def PX0(self) -> dists.ProbDist:
        """The initial state."""
        return dists.Normal(scale=INITIAL_SD)

    def PX(self, t: int, xp: np.ndarray) -> dists.ProbDist:
        """The state after action t - 1."""
        action = self.actions[t - 1]
        return (
            dists.Dirac(loc=xp) if action == OBSERVE else dists.Normal(loc=xp + MOVES[action], scale=MOVE_SD)
        )

    def PY(self, t: int, xp: np.ndarray, x: np.ndarray) -> dists.ProbDist:
        """The observation of state x."""
        return dists.Normal(
            loc=x, scale=np.where(self.sign * x > 0.0, LIGHT_VARIANCE**0.5, DARK_VARIANCE**0.5)
        )

    def reward(self, W: np.ndarray, X: np.ndarray) -> float:
        """The expected reward, as a moment function of the library."""
        y = self.sign * X
        return np.dot(W, (y > 1.0).astype(float) - (y < 0.0))


class _MissingBootstrap(ssm.Bootstrap):
    """Bootstrap Feynman-Kac model whose missing observations (NaN) leave the weights alone."""

    def logG(self, t: int, xp: np.ndarray, x: np.ndarray) -> np.ndarray:
        """The log-weight increments of step t."""
        return np.zeros(x.shape[0]) if np.isnan(self.data[t]) else super().logG(t, xp, x)


def particles_filter(actions: np.ndarray, observations: np.ndarray, num_particles: int, seed: int) -> Result:
    """The library particles: one SMC run per row, with NumPy's global generator, which is seeded here.

    It resamples at the start of a step, so the expected reward is under the weights before the resampling.
    """
    np.random.seed(seed)
    shape = (*actions.shape, CONTEXTS)
    log_likelihood, increments = np.empty((shape[0], CONTEXTS)), np.empty(shape)
    reward, ess = np.empty(shape), np.empty(shape)
    data = np.where(actions == OBSERVE, observations.astype(np.float64), np.nan)
    data = np.concatenate([np.full((shape[0], 1), np.nan), data], axis=1)
    for b in range(shape[0]):
        for c in range(CONTEXTS):
            model = _LightDark(sign=1.0 - 2.0 * c, actions=actions[b].tolist())
            smc = particles.SMC(
                fk=_MissingBootstrap(ssm=model, data=data[b]),
                N=num_particles,
                qmc=False,
                resampling="systematic",
                ESSrmin=ESS_FRACTION,
                collect=[collectors.Moments(mom_func=model.reward)],
            )
            smc.run()
            log_likelihood[b, c] = smc.logLt
            increments[b, :, c] = np.diff(smc.summaries.logLts)
            reward[b, :, c] = smc.summaries.moments[:-1]
            ess[b, :, c] = smc.summaries.ESSs[1:]
    return log_likelihood, increments, reward, ess


# ------------------------------------------------------------------------------------------------------------
# 4. pyro.infer.SMCFilter
# ------------------------------------------------------------------------------------------------------------


class _PyroModel:
    """Light-Dark in one context for SMCFilter; also its own bootstrap proposal, as guide."""

    def __init__(self, sign: float, is_guide: bool) -> None:
        """Set the context's sign and whether this is the guide, which neither writes states nor observes."""
        self.sign, self.is_guide = sign, is_guide

    def init(self, state: dict[str, torch.Tensor]) -> None:
        """Draw the initial state."""
        x = pyro.sample("x", dist.Normal(0.0, INITIAL_SD))
        if not self.is_guide:
            state["x"] = x

    def step(self, state: dict[str, torch.Tensor], action: int, z: float) -> None:
        """Move, with noise, or observe, without any."""
        if action != OBSERVE:
            x = pyro.sample("x", dist.Normal(state["x"] + MOVES[action], MOVE_SD))
            if not self.is_guide:
                state["x"] = x
        elif not self.is_guide:
            x = state["x"]
            scale = torch.where(self.sign * x > 0.0, LIGHT_VARIANCE**0.5, DARK_VARIANCE**0.5)
            pyro.sample("z", dist.Normal(x, scale), obs=torch.tensor(z))


class _EvidenceSMCFilter(SMCFilter):
    """SMCFilter that keeps the evidence increment and ESS of its last step, which the base class discards."""

    increment = 0.0
    ess = 0.0

    def _update_weights(self, model_trace: pyro.poutine.Trace, guide_trace: pyro.poutine.Trace) -> None:
        """Weight as the base class does, and take the increment from the log-densities that it computes."""
        before = self.state._log_weights.clone()
        super()._update_weights(model_trace, guide_trace)
        self.increment = 0.0
        if "z" in model_trace.nodes:
            log_p = model_trace.nodes["z"]["log_prob"]
            self.increment = (torch.logsumexp(before + log_p, 0) - torch.logsumexp(before, 0)).item()

    def _maybe_importance_resample(self) -> None:
        """The base class's method, which also records the ESS."""
        log_weights = self.state._log_weights
        log_weights -= log_weights.logsumexp(-1)
        probs = log_weights.exp()
        self.ess = probs.dot(probs).reciprocal().item()
        if self.ess < self.ess_threshold * self.num_particles:
            self._importance_resample(probs)

    def expected_reward(self, sign: float) -> float:
        """The expected reward of the current particles."""
        y = sign * self.state["x"]
        return torch.dot(self.state._log_weights.softmax(-1), (y > 1.0).float() - (y < 0.0).float()).item()


@torch.no_grad()
def pyro_smcfilter(actions: np.ndarray, observations: np.ndarray, num_particles: int, seed: int) -> Result:
    """pyro.infer.SMCFilter, which filters one row at a time; Pyro's validation is off."""
    torch.set_num_threads(1)
    pyro.set_rng_seed(seed)
    shape = (*actions.shape, CONTEXTS)
    increments, reward, ess = np.empty(shape), np.empty(shape), np.empty(shape)
    with pyro.validation_enabled(False):
        for b, c in np.ndindex(shape[0], CONTEXTS):
            sign = 1.0 - 2.0 * c
            smc = _EvidenceSMCFilter(
                _PyroModel(sign, False), _PyroModel(sign, True), num_particles, 0, ess_threshold=ESS_FRACTION
            )
            smc.init()
            for t, (action, z) in enumerate(zip(actions[b].tolist(), observations[b].tolist(), strict=True)):
                reward[b, t, c] = smc.expected_reward(sign)
                smc.step(action, z)
                increments[b, t, c], ess[b, t, c] = smc.increment, smc.ess
    return increments.sum(1), increments, reward, ess
