"""Kalman filters as one C kernel, written from a model's programs."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyro
import torch
from torch import Tensor

from cpomdp_ppl.inference.engine import run_once
from cpomdp_ppl.inference.filtering import Filtering
from cpomdp_ppl.inference.kalman_source import kalman_source
from cpomdp_ppl.inference.moment_matching import normal_points
from cpomdp_ppl.inference.precision import double_precision, in_double_precision
from cpomdp_ppl.inference.traced_gaussian import GaussianModel, trace_gaussian
from cpomdp_ppl.native.compiler import compiled
from cpomdp_ppl.native.expressions import KIND_OF, Graph, Untraceable, inputs_of
from cpomdp_ppl.native.operations import array
from cpomdp_ppl.native.prelude import c_text, prelude
from cpomdp_ppl.native.tracing import Argument
from cpomdp_ppl.state import map_state

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.inference.engine import Parameters
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.signature import Leaf, Signature

WORK_FOR_A_THREAD = 2**20
"""Points at which a program is run, below which a further thread is not worth its start."""

LARGEST = 2**15
"""Numbers that a step may need room for; from there on, matrices are large enough for LAPACK."""

I64, VOID = ctypes.c_int64, ctypes.c_void_p


class KalmanTask(ctypes.Structure):
    """What the kernel is to do; see kalman.c."""

    _fields_ = (
        *((name, I64) for name in ("first", "last", "B", "T", "N")),
        *(
            (name, VOID)
            for name in (
                *("actions", "lengths", "vectors", "values", "flags", "first_values", "first_flags"),
                *(
                    "constants",
                    "params",
                    "tables",
                    "points",
                    "sigma_start",
                    "sigma_move",
                    "sigma_sight",
                    "room",
                ),
                *("increments", "first_increment", "rewards", "mean", "variance"),
            )
        ),
    )


@dataclass(frozen=True)
class KalmanSettings:
    """What a filter says of itself at run time.

    Attributes:
        reward_points: Number of points of the belief at which the reward is averaged.
        sigma_points: From a dimension n to distance and weights, in means and covariances, of the `2n + 1`
            sigma points; None for filters that linearise.
    """

    reward_points: int
    sigma_points: Callable[[int], tuple[float, Tensor, Tensor]] | None = None


@cache
def _driver() -> str:
    return c_text("kalman.c", "cpomdp_ppl.inference")


class KalmanKernel:
    """A compiled Kalman filter of a model.

    Args:
        model: The model.
        signature: Its signature, with dependencies.
        parameters: Its learned constants.
        extended: Whether it linearises programs, rather than running them at sigma points.

    Raises:
        Untraceable: If a program cannot be compiled, or is not Gaussian.
        CompilerError: If there is no compiler, or it fails.
    """

    def __init__(self, model: CPOMDP, signature: Signature, parameters: Parameters, extended: bool) -> None:
        self.signature, self.parameters = signature, parameters
        self.num_contexts, self.extended = model.num_contexts, extended
        self.traced, self._copy = _traced(model, signature, parameters, extended)
        actions = (model.num_actions, 0) if model.box is None else (0, model.box.dim)
        self._continuous = model.box is not None
        source, constants = kalman_source(self.traced, model.num_contexts, *actions, extended)
        self.source = "\n".join([prelude(), source, _driver()])
        self._constants = np.array([*constants, 0.0])
        self._tables = [np.ascontiguousarray(table) for table in self.traced.graph.tables]
        self._table_places = np.array([table.ctypes.data for table in self._tables] + [0], np.uint64)
        self._value_types = self._types_of_values()
        self._function = compiled(self.source).filter_rows
        self._function.restype = ctypes.c_int

    def _types_of_values(self) -> dict[str, torch.dtype]:
        """The types of the sites that others are computed from."""
        observations = (self.traced.observation, self.traced.first_observation)
        used: set[Any] = set()
        for each in observations:
            if each is not None:
                program = each.program
                slopes = [e for row in program.slopes for e in row]
                outputs = [*program.values, *slopes, *each.covariance, *each.visible]
                used |= inputs_of([*outputs, *program.checks, *program.central])
        found, first = {}, 0
        for name, spec in self.signature.observations.items():
            size = spec.shape.numel()
            if any(("value", k) in used for k in range(first, first + size)):
                found[name] = spec.dtype
            first += size
        return found

    def serves(self, episodes: Episodes) -> bool:
        """Whether these episodes can be filtered, of a model that can be."""
        if episodes.device.type != "cpu":
            return False
        pairs = [(episodes.observations, episodes.observed, 1)]
        if episodes.initial_observations is not None and episodes.initially_observed is not None:
            pairs.append((episodes.initial_observations, episodes.initially_observed, 0))
        return all(
            all(values[name].dtype == dtype for name, dtype in self._value_types.items())
            and not _parents_are_hidden(self.signature, observed, time)
            for values, observed, time in pairs
        )

    def run(
        self, settings: KalmanSettings, model: CPOMDP, episodes: Episodes, moments: bool
    ) -> Filtering | None:
        """Filter a batch of episodes; None if it has to be run eagerly, which will say why."""
        if not self.serves(episodes):
            return None
        B, T, C, D = len(episodes), episodes.horizon, self.num_contexts, self.traced.dim
        N = settings.reward_points
        given = self._given(settings, episodes)
        out = {
            "increments": torch.empty(B, T, C, dtype=torch.float64),
            "first_increment": torch.empty(B, C, dtype=torch.float64),
            "rewards": torch.empty(B, T, C, dtype=torch.float64),
        }
        if moments:
            out |= {name: torch.empty(B, T + 1, C, D, dtype=torch.float64) for name in ("mean", "variance")}
        params = np.concatenate([self.parameters.values(), [0.0]])
        task = KalmanTask(
            *(0, B, B, T, N),
            constants=self._constants.ctypes.data,
            params=params.ctypes.data,
            tables=self._table_places.ctypes.data,
            **{name: tensor.data_ptr() for name, tensor in (given | out).items()},
        )
        if self._call(task, self._threads(B, T * C * N)):
            return None
        return Filtering(
            increments=out["increments"],
            initial_increment=out["first_increment"],
            expected_reward=out["rewards"].to(self.traced.reward_type),
            prior=self.parameters.prior(model),
            state_mean=self._as_state(out.get("mean")),
            state_variance=self._as_state(out.get("variance")),
        )

    def _given(self, settings: KalmanSettings, episodes: Episodes) -> dict[str, Tensor]:
        """What the kernel reads, by its name there."""
        B, T = episodes.actions.shape[:2]
        given = {"lengths": episodes.lengths.contiguous()}
        if self._continuous:
            given["vectors"] = episodes.actions.double().contiguous()
        else:
            given["actions"] = episodes.actions.contiguous()
        given["values"], given["flags"] = self._packed(episodes.observations, episodes.observed, (B, T))
        if episodes.initial_observations is not None and episodes.initially_observed is not None:
            values, flags = self._packed(episodes.initial_observations, episodes.initially_observed, (B,))
            given |= {"first_values": values, "first_flags": flags}
        given["points"] = _points(settings.reward_points, self.traced.dim + self.traced.reward_noise)
        if settings.sigma_points is not None:
            D, E = self.traced.dim, self.traced.transition_noise
            for name, n in (("start", self.traced.initial_noise), ("move", D + E), ("sight", D)):
                distance, *weights = settings.sigma_points(n)
                given[f"sigma_{name}"] = torch.cat([torch.tensor([distance], dtype=torch.float64), *weights])
        return given

    def _packed(self, observations: Any, observed: Any, batch: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Values of all sites side by side, and flags."""
        values = [observations[name].reshape(*batch, -1).double() for name in self.signature.observations]
        flags = [observed[name].reshape(*batch, -1) for name in self.signature.observations]
        joined = (torch.cat(values, -1), torch.cat(flags, -1)) if len(values) > 1 else (values[0], flags[0])
        return joined[0].contiguous(), joined[1].contiguous()

    def _threads(self, num_episodes: int, work: int) -> int:
        useful = min(num_episodes, num_episodes * work // WORK_FOR_A_THREAD)
        return max(1, min(torch.get_num_threads(), useful))

    def _call(self, task: KalmanTask, num_threads: int) -> int:
        """Filter all episodes, shared among threads. Returns a status, 0 if all went well."""
        cuts = np.linspace(0, task.B, num_threads + 1).astype(int).tolist()
        D, rooms = self.traced.dim, []
        parts = [KalmanTask.from_buffer_copy(task) for _ in range(num_threads)]
        for part, first, last in zip(parts, cuts[:-1], cuts[1:], strict=True):
            part.first, part.last = first, last
            rooms.append(np.empty((D + 1) * task.N + self.num_contexts * (D + D * D)))
            part.room = rooms[-1].ctypes.data
        if num_threads == 1:
            return int(self._function(ctypes.byref(parts[0])))
        with ThreadPoolExecutor(num_threads) as pool:
            return max(pool.map(lambda part: int(self._function(ctypes.byref(part))), parts))

    def _as_state(self, numbers: Tensor | None) -> Any:
        """Numbers `[B, T + 1, C, D]` as leaves `[B, T + 1, C, *leaf]` in the types of the model."""
        if numbers is None:
            return None
        batch, at = numbers.shape[:-1], 0

        def leaf_of(leaf: Leaf) -> Tensor:
            nonlocal at
            part = numbers[..., at : at + leaf.shape.numel()]
            at += leaf.shape.numel()
            return part.reshape(batch + leaf.shape).to(leaf.dtype)

        return map_state(leaf_of, self.signature.state)


@cache
def _points(num_points: int, dim: int) -> Tensor:
    """Points of a standard normal, every coordinate of all of them side by side."""
    return normal_points(num_points, dim).double().T.contiguous()


def _traced(
    model: CPOMDP, signature: Signature, parameters: Parameters, extended: bool
) -> tuple[GaussianModel, CPOMDP | None]:
    """The programs in double precision, and the copy of the model that they are those of, if it is one.

    Raises:
        Untraceable: If they cannot be written as scalar expressions, or are not those of a Gaussian model.
    """
    graph, store = Graph(), pyro.get_param_store()
    others = {each.key for each in parameters.found if each.module is None}
    state: Any = {
        part: {name: value for name, value in known.items() if name in others}  # type: ignore[attr-defined]
        for part, known in store.get_state().items()
    }
    # Modules would take parameters from the store in the precision that they have there.
    with double_precision(), store.scope(state):
        copy = in_double_precision(model)
        learned = _learned(model, copy, parameters, graph)
        traced = trace_gaussian(copy, signature, learned, graph, extended)
    if copy is not model:  # the watch has to see what programs read in the model itself
        run_once(model, signature)
    if _room(traced) > LARGEST:
        raise Untraceable("states and observations are large enough for matrix libraries")
    return traced, None if copy is model else copy


def _room(traced: GaussianModel) -> int:
    """How many numbers a step of the kernel needs room for, at the most."""
    D, M, n = traced.dim, len(traced.flag_of), traced.dim + traced.transition_noise
    return (2 * n + 1) * (3 * D + n) + (2 * D + 1) * (M * (M + 2) + 3 * D) + 2 * D * traced.initial_noise


def _learned(model: CPOMDP, copy: CPOMDP, parameters: Parameters, graph: Graph) -> list[Argument]:
    """Learned constants as inputs of the programs of a copy, which may find them there or elsewhere."""
    names = {id(module): name for name, module in model.named_modules()}
    arguments, first = [], 0
    for each in parameters.found:
        tensor = each.tensor()
        if tensor is None:
            raise Untraceable(f"the parameter '{each.key}' is gone")
        found = {id(tensor): tensor}
        if each.module is not None:
            twin = copy.get_submodule(names[id(each.module())])._parameters[each.key]
            assert twin is not None
            found[id(twin)] = twin
        for place in found.values():
            if place.dtype not in KIND_OF:
                raise Untraceable(f"the parameter '{each.key}' is not made of numbers that kernels know")
            kind = KIND_OF[place.dtype]
            inputs = [graph.input("param", first + k, kind) for k in range(place.numel())]
            arguments.append(Argument(place.detach(), array(inputs, tuple(place.shape))))
        first += tensor.numel()
    return arguments


def _parents_are_hidden(signature: Signature, observed: Mapping[str, Tensor], time_axis: int) -> bool:
    """Whether something was observed at a time at which what it depends on was not, in every episode.

    As `hidden_parents` has it, for all times `[B, T, …]` at once, or for one, `[B, …]`.
    """
    parents = signature.dependencies.parents
    if not parents:
        return False
    axes = 1 + time_axis
    flags = {name: each.reshape(*each.shape[:axes], -1) for name, each in observed.items()}
    anything = torch.cat(list(flags.values()), -1).any(-1)
    needed: dict[str, Tensor] = {}
    for name in reversed(list(signature.observations)):
        counts = flags[name].any(-1).any(0) | needed.get(name, torch.tensor(False))
        for parent in parents.get(name, ()):
            needed[parent] = counts | needed.get(parent, torch.tensor(False))
    return any(
        bool((counts & ~(flags[name].all(-1) | ~anything).all(0)).any()) for name, counts in needed.items()
    )
