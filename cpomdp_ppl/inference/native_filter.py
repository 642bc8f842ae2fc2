"""The particle filter as one C kernel, written from a model's programs."""

from __future__ import annotations

import ctypes
import math
import struct
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property, reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cpomdp_ppl.inference.filtering import Filtering
from cpomdp_ppl.inference.kernel_cloud import Layout, array_of
from cpomdp_ppl.inference.resampling import SCHEMES as SCHEMES_BY_NAME
from cpomdp_ppl.inference.traced import TracedModel, trace_model
from cpomdp_ppl.native.c_code import type_of
from cpomdp_ppl.native.compiler import compiled
from cpomdp_ppl.native.expressions import KIND_OF, Graph
from cpomdp_ppl.native.kernel import Source
from cpomdp_ppl.native.prelude import c_text, prelude, program_declarations
from cpomdp_ppl.native.recording import unwatched
from cpomdp_ppl.rng import fresh_seed
from cpomdp_ppl.state import map_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.engine import Parameters
    from cpomdp_ppl.inference.observed import Observed
    from cpomdp_ppl.inference.particle_filter import ParticleFilter
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.signature import Signature

SCHEMES = ("systematic", "stratified", "multinomial", "residual")
"""Resampling schemes in the order in which the kernel numbers them."""

RESAMPLE, MOVE, WEIGH, REWARD = 1, 2, 4, 8
"""Parts of a step."""

NOT_COMPILED = 4
"""The status of a batch in which a site was not observed that others depend on, and that takes other code."""

OTHER_TYPES = 64
"""The status of a batch whose observations are not of the sites' types."""

WORK_FOR_A_THREAD = 2**18
"""Particle-steps below which a further thread is not worth its start."""

POINTERS = (
    *("keys", "actions", "lengths", "vectors", "values", "flags", "first_values", "first_flags"),
    *("constants", "params", "tables", "increments", "first_increment"),
    *("rewards", "ess", "error", "resampled", "mean", "variance", "state_in", "state_out", "strides"),
    *(
        "weights_in",
        "weights_out",
        "founders_in",
        "founders_out",
        "noise_in",
        "noise_out",
        "ess_in",
        "ess_out",
    ),
    "ancestors",
)
"""Arrays that a task has, in the order of filter.c."""

MOST_LAYOUTS = 64
"""Layouts of clouds that are kept, for numbers of episodes and particles that come again."""

I64, F64, VOID = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class Task(ctypes.Structure):
    """What the kernel is to do; see filter.c."""

    _fields_ = (
        *((name, I64) for name in ("first", "last", "B", "T", "N", "parts", "scheme", "common", "tries")),
        ("threshold", F64),
        *((name, VOID) for name in POINTERS),
    )


@cache
def _driver(real: str, score: str) -> Any:
    """The filter itself, by the types of weights and of log-densities: the same for all models."""
    wide = "##_d" if score == "f64" else ""
    types = f"typedef {real} real;\ntypedef {score} score;\n#define S(name) m_##name{wide}"
    text = c_text("filter.c", "cpomdp_ppl.inference")
    function = compiled("\n".join([prelude(), program_declarations(), types, text])).filter_rows
    function.restype = ctypes.c_int
    return function


class FilterKernel:
    """The compiled particle filter of a model.

    Args:
        model: The model.
        signature: Its signature, with dependencies.
        parameters: Its learned constants.

    Raises:
        Untraceable: If a program cannot be compiled.
        CompilerError: If there is no compiler, or it fails.
    """

    def __init__(self, model: CPOMDP, signature: Signature, parameters: Parameters) -> None:
        graph = Graph()
        self.signature, self.parameters = signature, parameters
        self.traced = trace_model(model, signature, parameters.arguments(graph), graph)
        self.num_contexts = model.num_contexts
        kinds = {e.kind for e in self.traced.initial.outputs} | {KIND_OF[torch.get_default_dtype()]}
        self.dtype = torch.float64 if "f64" in kinds else torch.float32
        with unwatched():
            real, score = KIND_OF[self.dtype], _kind_of_scores(self.traced, KIND_OF[self.dtype])
            self.source, constants = _written(self.traced, model, real, score)
        self._constants = np.array([*constants, 0.0])
        self._tables = [np.ascontiguousarray(table) for table in graph.tables]
        self._table_places = np.array([table.ctypes.data for table in self._tables] + [0], np.uint64)
        self._library = compiled(self.source)
        self._programs = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(self._library, "programs")))
        self._function = _driver(real, score)

    def run(
        self, settings: ParticleFilter, model: CPOMDP, episodes: Episodes, seed: int | None, moments: bool
    ) -> Filtering | int:
        """Filter a batch of episodes; if that has to be done eagerly, a status of filter.c that says why."""
        B, T, C = len(episodes), episodes.horizon, self.num_contexts
        generator = torch.Generator().manual_seed(fresh_seed(seed))
        first = episodes.initial_observations is not None
        given_first = episodes.initial_observations if first else {}
        if not (self.fits(episodes.observations) and (not given_first or self.fits(given_first))):
            return OTHER_TYPES
        keys = torch.randint(2**62, (1 + first + T,), generator=generator)
        given = {"keys": keys if first else torch.cat([keys[:1], keys])}
        given["lengths"] = episodes.lengths
        if self.traced.action_dim is None:
            given["actions"] = episodes.actions
        else:
            given["vectors"] = episodes.actions.double()
        given["values"], given["flags"] = self.packed(episodes.observations, episodes.observed, (B, T))
        if first:
            given["first_values"], given["first_flags"] = self.packed(
                episodes.initial_observations, episodes.initially_observed, (B,)
            )
        out = self._room(B, T)
        out |= {"ess": self._reals(B, T, C), "error": self._reals(B, C)}
        if moments:
            out |= {name: self._reals(B, T + 1, C, len(self.traced.bounds)) for name in ("mean", "variance")}
        status = self._call(settings, RESAMPLE | MOVE | WEIGH | REWARD, settings.num_particles, given, out)
        if status:
            return status
        mean, variance = (self._as_state(out.get(name), (B, T + 1, C)) for name in ("mean", "variance"))
        return Filtering(
            increments=out["increments"],
            initial_increment=out["first_increment"],
            expected_reward=out["rewards"],
            prior=self.parameters.prior(model),
            state_mean=mean,
            state_variance=variance,
            ess=out["ess"],
            resampled=out["resampled"],
            standard_error=out["error"],
        )

    def _reals(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype)

    def _room(self, B: int, T: int) -> dict[str, Tensor]:
        """Where the kernel writes what it is always asked for."""
        C = self.num_contexts
        return {
            "increments": torch.zeros(B, T, C, dtype=torch.float64),
            "first_increment": torch.zeros(B, C, dtype=torch.float64),
            "rewards": self._reals(B, T, C),
            "resampled": torch.zeros(B, T, C, dtype=torch.bool),
        }

    def _call(
        self,
        settings: ParticleFilter,
        parts: int,
        N: int,
        given: dict[str, Tensor],
        out: dict[str, Tensor],
    ) -> int:
        """Run the kernel on tensors. Returns a status, 0 if all went well."""
        B, T = out["increments"].shape[:2]
        held = out | {name: tensor.contiguous() for name, tensor in given.items()}
        places = {name: tensor.data_ptr() for name, tensor in held.items()}
        return self.execute(settings, parts, B, T, N, places)

    def execute(
        self, settings: ParticleFilter, parts: int, B: int, T: int, N: int, places: dict[str, int]
    ) -> int:
        """Run the kernel, episodes shared among threads. Returns a status, 0 if all went well.

        Args:
            settings: The filter.
            parts: Parts of a step.
            B: Number of episodes.
            T: Number of steps.
            N: Number of particles.
            places: Where inputs and outputs are, by their names in `Task`.
        """
        task = Task(
            last=B,
            B=B,
            T=T,
            N=N,
            parts=parts,
            scheme=SCHEMES.index(scheme_name(settings.resampling)),
            common=int(settings.common_random_numbers),
            tries=settings.tries,
            threshold=settings.ess_threshold,
            **self._fixed_places,
            **places,
        )
        if self.parameters.found:
            params = self.parameters.values()
            task.params = params.ctypes.data
        num_threads = self._threads(B, max(T, 1) * self.num_contexts * N * settings.tries)
        if num_threads == 1:
            return int(self._function(ctypes.byref(task), self._programs))
        cuts = np.linspace(0, B, num_threads + 1).astype(int).tolist()
        tasks = [Task.from_buffer_copy(task) for _ in range(num_threads)]
        for each, first, last in zip(tasks, cuts[:-1], cuts[1:], strict=True):
            each.first, each.last = first, last
        with ThreadPoolExecutor(num_threads) as pool:
            return reduce(
                or_, pool.map(lambda each: int(self._function(ctypes.byref(each), self._programs)), tasks)
            )

    @cached_property
    def _fixed_places(self) -> dict[str, int]:
        """Where constants are, and how far apart the particles in every number of a state."""
        sizes = [shape.numel() for shape, _ in self.traced.leaves]
        self._strides = np.array([size for size in sizes for _ in range(size)] + [0], np.int64)
        arrays = {"constants": self._constants, "tables": self._table_places, "strides": self._strides}
        return {name: array.ctypes.data for name, array in arrays.items()}

    def _threads(self, num_episodes: int, work: int) -> int:
        if num_episodes == 1:
            return 1
        useful = min(num_episodes, math.ceil(num_episodes * work / WORK_FOR_A_THREAD))
        return max(1, min(torch.get_num_threads(), useful))

    def fits(self, observations: Mapping[str, Tensor]) -> bool:
        """Whether whole numbers are given as such; what else they might be is for the programs to say."""
        return all(
            site.dtype.is_floating_point or observations[name].dtype == site.dtype
            for name, site in self.traced.sites.items()
        )

    def packed(self, observations: Any, observed: Any, batch: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Values of all sites side by side, whole numbers as they are in memory; and flags.

        To be asked only for what `fits`.
        """
        values, flags = [], []
        for name, site in self.traced.sites.items():
            value = observations[name].reshape(*batch, -1)
            real = site.dtype.is_floating_point
            values.append(value.double() if real else value.long().view(torch.float64))
            flags.append(observed[name].reshape(*batch, -1))
        joined = (torch.cat(values, -1), torch.cat(flags, -1)) if len(values) > 1 else (values[0], flags[0])
        return joined[0].contiguous(), joined[1].contiguous()

    def layout(self, B: int, N: int) -> Layout:
        """Where the kernel leaves a cloud of N particles for each of B episodes."""
        found = self._layouts.get((B, N))
        if found is None:
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            found = self._layouts[B, N] = Layout(self.signature, (self.num_contexts, B, N), self.dtype)
        return found

    @cached_property
    def masks(self) -> dict[int | None, Mapping[str, Tensor]]:
        """Room to note what the programs show after every action; see `NativeSMC.known_masks`."""
        return {}

    @cached_property
    def _layouts(self) -> dict[tuple[int, int], Layout]:
        return {}

    def packed_one(self, observed: Observed) -> tuple[ctypes.Array[Any], ctypes.Array[Any]]:
        """As `packed`, of one step of one episode: several times sooner than by tensors."""
        numbers: list[float] = []
        flags: list[bool] = []
        for name, site in self.traced.sites.items():
            value = observed.observations[name]
            numbers += _listed(value if site.dtype.is_floating_point else value.long())
            flags += _listed(observed.observed[name])
        values = array_of(F64, len(numbers))()
        self._layout.pack_into(values, 0, *numbers)
        return values, array_of(ctypes.c_uint8, len(flags))(*flags)

    @cached_property
    def _layout(self) -> struct.Struct:
        """Values of all sites side by side."""
        sites = self.traced.sites.values()
        kinds = [("d" if each.dtype.is_floating_point else "q") * each.shape.numel() for each in sites]
        return struct.Struct("=" + "".join(kinds))

    def _as_state(self, numbers: Tensor | None, batch: tuple[int, ...]) -> Any:
        """Numbers `[…, D]` as leaves `[…, *leaf]`."""
        if numbers is None:
            return None
        sizes = [shape.numel() for shape, _ in self.traced.leaves]
        parts = iter(numbers.split(sizes, -1))
        return map_state(lambda leaf: next(parts).reshape(*batch, *leaf.shape), self.signature.state)


def scheme_name(resampling: Any) -> str | None:
    """The name of a resampling scheme that the kernel knows; None for others."""
    if isinstance(resampling, str):
        return resampling
    return next((name for name, scheme in SCHEMES_BY_NAME.items() if scheme == resampling), None)


def _listed(tensor: Tensor) -> list[Any]:
    """All numbers of a tensor."""
    numbers: list[Any] = (tensor if tensor.dim() == 1 else tensor.flatten()).tolist()
    return numbers


def _kind_of_scores(traced: TracedModel, real: str) -> str:
    """The kind of log-densities: float64 if weights or any of these are."""
    observations = [each for each in (traced.observation, traced.first_observation) if each is not None]
    kinds = {
        program.outputs[0].kind
        for each in observations
        for program in (each.complete, each.partial)
        if program is not None
    }
    return "f64" if "f64" in kinds | {real} else "f32"


def _written(traced: TracedModel, model: CPOMDP, real: str, score: str) -> tuple[str, list[float]]:
    """The C text of a model's programs, and their constants."""
    C, A = model.num_contexts, model.num_actions if model.box is None else 0
    first, usual = traced.first_observation, traced.observation
    scores = {
        "score": usual.complete,
        "partial_score": usual.partial,
        "first_score": None,
        "first_partial_score": None,
    }
    if first is not None:
        scores |= {"first_score": first.complete, "first_partial_score": first.partial}
    programs = [traced.initial, traced.transition, traced.reward, *filter(None, scores.values())]
    E = max(len(program.noise) for program in programs)
    numbers = traced.initial.outputs
    types = [_stored(e.kind, bounds) for e, bounds in zip(numbers, traced.bounds, strict=True)]
    source = Source(traced.graph, C, A, E, types)
    source.add("start", traced.initial)
    source.add("move", traced.transition)
    source.add("reward", traced.reward, output=real)
    for name, program in scores.items():
        source.add(name, program, output=score, num_masks=traced.num_flags)
    limits = [bounds or ("INT64_MIN", "INT64_MAX") for bounds in traced.bounds]
    text = source.text(
        C=C,
        A=source.rows,
        reals=traced.action_dim or 0,
        D=len(numbers),
        E=E,
        values=traced.num_values,
        flags=traced.num_flags,
        num_parents=len(traced.parents),
        specialised=int(source.specialised),
        type=("u8", [each.upper() for each in types]),
        given=("u8", [f"GIVEN_{e.kind.upper()}" for e in numbers]),
        low=("i64", [low for low, _ in limits]),
        high=("i64", [high for _, high in limits]),
        parents=("int", traced.parents),
    )
    return "\n".join([prelude(), program_declarations(), text]), source.constants


def _stored(kind: str, bounds: Any) -> str:
    """The type in which the kernel keeps a number of the state."""
    if kind in ("f32", "f64"):
        return kind
    small = bounds is not None and bounds[0] >= -(2**31) and bounds[1] < 2**31
    return "i32" if small else type_of(kind)
