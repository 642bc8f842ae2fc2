"""POMCP and POUCT (Silver and Veness, 2010) from pomdp-py, on any CPOMDP.

The search is pomdp-py's; it plans in the POMDP whose states are `(s, c, t)`, and meets the model's programs
through `baselines.pomdp_py_adapter`. Needs the extra `pomcp`.
"""

from __future__ import annotations

import gc
import io
from contextlib import contextmanager, redirect_stdout
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from torch import Tensor

from baselines.belief import decided
from baselines.binning import UNSEEN, Binning
from baselines.pomdp_py_adapter import (
    Choices,
    LockStep,
    PlannerPOMCP,
    PlannerPOUCT,
    Rollout,
    Rows,
    agent,
    most_visited,
    particles,
)
from cpomdp_ppl.actions import require_finite_actions
from cpomdp_ppl.arrays import pieces
from cpomdp_ppl.errors import require, require_count, require_model, require_number
from cpomdp_ppl.generative import Generative
from cpomdp_ppl.inference import ParticleFilter, PerceptDensity, inference_scope
from cpomdp_ppl.inference.belief import map_belief
from cpomdp_ppl.policy import RandomPolicy
from cpomdp_ppl.prior import as_prior
from cpomdp_ppl.rng import require_seed, seed_for
from cpomdp_ppl.rollout import simulate
from cpomdp_ppl.signature import signature
from cpomdp_ppl.state import map_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pomdp_py
    from numpy.typing import NDArray

    from baselines.binning import Limits, Scheme
    from baselines.pomdp_py_adapter import RolloutsAsked, Symbol
    from cpomdp_ppl.inference import Cloud
    from cpomdp_ppl.inference.online import OnlineFilter
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import History, Percept

CALIBRATION_EPISODES = 1000
"""Episodes of random actions that show the scale of returns, and where observations lie."""

EXPLORATION: dict[Rollout, float] = {"commitment": 0.75, "blind": 2.0, "random": 2.0}
"""The default constant of UCB1, in standard deviations of the return of random actions."""

EPISODES_AT_ONCE = 512
"""Trees that grow side by side: enough to drown the programs' overhead, few enough to fit in memory."""


class _TreeSearch:
    """What POUCT and POMCP have in common: settings, and planning for all episodes at once."""

    kind: type[RolloutsAsked]

    def __init__(
        self,
        model: CPOMDP,
        num_simulations: int = 500,
        *,
        bins: int | None = 10,
        limits: Limits | None = None,
        scheme: Scheme = "uniform",
        rollout: Rollout = "blind",
        exploration: float | None = None,
        num_particles: int = 500,
        seed: int | None = 0,
    ) -> None:
        require_model(model)
        if exploration is not None:
            require_number(
                "exploration", exploration, "None or a number of at least 0, on the scale of returns"
            )
        require_seed(seed)
        require_finite_actions(model, type(self).__name__)
        self.model = model
        self.num_simulations = require_count("num_simulations", num_simulations)
        self.num_particles = require_count("num_particles", num_particles)
        require(rollout in get_args(Rollout), "rollout", rollout, f"one of {get_args(Rollout)}")
        self.rollout = rollout
        self.seed = seed
        self.signature = signature(model)
        self.rows = Rows(self.signature, model.device)
        self.choices = Choices(model.num_actions)
        policy = RandomPolicy(model.num_actions)
        episodes = simulate(model, policy, CALIBRATION_EPISODES, seed=seed_for(self.seed, 0))
        self.binning = Binning.of(self.signature.observations, episodes, bins, limits, scheme)
        assert episodes.returns is not None
        spread = EXPLORATION[rollout] * float(episodes.returns.std())
        self.exploration = spread if exploration is None else float(exploration)

    def _plan(self, agents: Sequence[pomdp_py.Agent], time: int) -> Tensor:
        """Grow a tree for every agent; the best actions, `[B]`."""
        lockstep = LockStep(Generative(self.model), self.binning, self.rollout)

        def task(each: pomdp_py.Agent) -> Any:
            def plan() -> int:
                best = self._planner(time).plan(each)
                return int((most_visited(each) if self.rollout == "commitment" else best).index)

            return plan

        found: list[int] = []
        with without_garbage_collection():
            for some in pieces(len(agents), EPISODES_AT_ONCE):
                found += lockstep.run([task(each) for each in agents[some]])
        return torch.tensor(found, device=self.model.device)

    def _planner(self, time: int) -> Any:
        """A new one for each step, as its depth is what is left of the horizon."""
        made = self.kind(  # type: ignore[call-arg]
            max_depth=self.model.horizon - time,
            num_sims=self.num_simulations,
            planning_time=-1.0,
            discount_factor=float(self.model.discount),
            exploration_const=self.exploration,
            num_visits_init=0,
            value_init=0,
            rollout_policy=self.choices,
        )
        made._horizon = self.model.horizon
        return made


class POUCT(_TreeSearch):
    """Tree search from the belief of a particle filter.

    At every step pomdp-py's POUCT grows a new tree, whose roots are drawn from the package's particle filter.
    The filter takes observations as they are; only inside the tree are they binned, as the search can only
    learn from what it meets again.

    Args:
        model: The CPOMDP, of finitely many actions.
        num_simulations: Simulations for each decision.
        bins: How many bins for each number of a continuous observation; None for none.
        limits: Where bins begin and end, for all sites or by site. Left out, where the observations of random
            actions lie, but for a percent; the outermost bins are open in any case.
        scheme: `"uniform"` for bins of equal width, `"quantile"` for bins that random actions see equally
            often.
        rollout: How a simulation goes on below the tree. `"blind"` takes one action at random and keeps to
            it; `"random"` takes a new one at every step; `"commitment"` plays every action to the end, in
            all contexts, weighed by what the simulation has seen. These are the first values of the actions
            of a new node, the best is the node's, and in the end the action visited most is taken; with the
            others, it is the one of the highest mean, as pomdp-py has it. None of them sees the context it
            is in: observing would then look like full revelation; see `Rollouts`. But `"commitment"` takes
            the state of a simulation for known. That is what makes it cheap, and serves where contexts
            differ in what is seen or earned in a state; where they show in the state itself, search with
            `baselines.pft.PFT`, whose nodes are beliefs. So do where costs come first and profits later:
            actions that are repeated for ever, or at random, show none of these profits.
        exploration: The constant of UCB1, on the scale of returns. Left out, twice the standard deviation of
            the return of random actions; three quarters of it with `"commitment"`, which is less noisy.
        num_particles: Particles of the filter for each context, and of the belief that simulations start
            from.
        seed: Seed of all random numbers; None takes fresh entropy.

    Examples:
        >>> from cpomdp_ppl import simulate
        >>> from cpomdp_ppl.models import LineGrid
        >>> model = LineGrid()
        >>> simulate(model, POUCT(model, num_simulations=50), 10, seed=0).returns.shape
        torch.Size([10])
    """

    kind = PlannerPOUCT

    def start(self, prior: Tensor) -> OnlineFilter:
        """The filter before anything was seen, for priors `[B, C]`."""
        backend = ParticleFilter(self.num_particles)
        return backend.online(self.model, len(prior), prior=prior, seed=seed_for(self.seed, 1))

    def act(self, history: History, memory: OnlineFilter) -> tuple[Tensor, OnlineFilter]:
        """Take in what was seen, and search; actions `[B]` and the filter."""
        online, t = copy(memory), history.time  # a copy, as the caller may want to go on from there again
        if t > 0 or self.model.initial_observation:
            seen = history.latest
            online.observe(seen.action, seen.observations, seen.observed)

        def best(rows: Tensor | None) -> Tensor:
            belief, posterior = online.belief, online.posterior
            if rows is not None:
                belief = map_belief(lambda leaf: leaf.index_select(1, rows), belief)
                posterior = posterior[rows]
            roots = self._roots(belief, posterior, t)
            return self._plan([agent(root, self.model.horizon, self.choices) for root in roots], t)

        with inference_scope(self.model, seed_for(self.seed, 2, t)):
            return decided(self.model, history, best), online

    def _roots(self, cloud: Cloud, posterior: Tensor, time: int) -> Iterator[pomdp_py.Particles]:
        """Draw states and contexts for every episode."""
        C, B, N = cloud.shape
        joint = (posterior.T[:, :, None] * cloud.weights.values).movedim(1, 0).reshape(B, C * N)
        drawn = torch.multinomial(joint, self.num_particles, replacement=True)  # [B, M] of C·N
        rows = self.rows.of(map_state(lambda leaf: leaf.flatten(0, 2), cloud.state))  # [C·B·N, K]
        b = torch.arange(B, device=drawn.device)[:, None]
        c = drawn // N
        x = rows[(c * B + b) * N + drawn % N]  # [B, M, K]
        return map(particles, x, c, [time] * B, posterior.log()[:, None].expand(B, self.num_particles, C))


@dataclass
class Deprivation:
    """How often a belief was lost, over everything a policy has done so far."""

    updates: int = 0  # how often a belief was brought up to date
    looks: int = 0  # in how many of those there was something to see
    deprived: int = 0  # how often no particle was left
    episodes: int = 0
    episodes_deprived: int = 0  # in which that happened at least once

    @property
    def rate(self) -> float:
        """The share of updates that left no particle."""
        return self.deprived / max(self.updates, 1)

    @property
    def episode_rate(self) -> float:
        """The share of episodes in which that happened."""
        return self.episodes_deprived / max(self.episodes, 1)


@dataclass(frozen=True)
class Trees:
    """What POMCP remembers. A step takes it over: the trees before become part of the new ones."""

    prior: Tensor  # over contexts, [B, C]
    agents: tuple[pomdp_py.Agent, ...]  # with belief and tree; none before the first step
    deprived: NDArray[np.bool_]  # which episodes have ever lost their belief, [B]


class POMCP(_TreeSearch):
    """POMCP as in the paper: the tree below what was done and seen is kept, and its particles are the belief.

    A particle gets there only if a simulation has seen just what was seen. With `bins=None` and continuous
    observations none ever has: pomdp-py gives up with "Particle deprivation". With bins this is rarer, but
    the particles are few, and pomdp-py fills up their number with copies. Where none is left, the belief
    before is pushed through the action, and what was seen is ignored, but that the episode goes on; if that
    happens every time, it is the prior pushed through all actions. `deprivation` counts how often it did, in
    this process.

    Args:
        model: The CPOMDP, of finitely many actions.
        num_simulations: Simulations for each decision.
        settings: Further settings, as in `POUCT`: `bins` for each number of a continuous observation (None
            for none), `limits` and `scheme` of these bins, the `rollout`, the constant of UCB1
            (`exploration`), the number of particles of the belief (`num_particles`), and a `seed`.

    Attributes:
        deprivation: How often a belief was lost so far. It decides nothing.

    Examples:
        >>> from cpomdp_ppl import simulate
        >>> from cpomdp_ppl.models import LightDark
        >>> model = LightDark(horizon=4)
        >>> policy = POMCP(model, num_simulations=50, num_particles=50)
        >>> episodes = simulate(model, policy, 10, seed=0)
        >>> 0 <= policy.deprivation.rate <= 1
        True
    """

    kind = PlannerPOMCP

    def __init__(self, model: CPOMDP, num_simulations: int = 500, **settings: Any) -> None:
        super().__init__(model, num_simulations, **settings)
        self.deprivation = Deprivation()

    def start(self, prior: Tensor) -> Trees:
        """No trees yet; priors `[B, C]`."""
        B = len(prior)
        self.deprivation.episodes += B
        p = as_prior(prior, self.model.num_contexts, B).expand(B, -1)
        return Trees(p.to(self.model.device), (), np.zeros(B, dtype=bool))

    def act(self, history: History, memory: Trees) -> tuple[Tensor, Trees]:
        """Go down the tree to what was seen, and search on from there; actions `[B]` and the trees."""
        t = history.time
        with inference_scope(self.model, seed_for(self.seed, 2, t)):
            programs, alive = Generative(self.model), history.alive
            going_on = torch.arange(len(memory.prior)) if alive is None else alive.nonzero()[:, 0]
            symbols = self.binning.symbols(history.latest, going_on)
            lost: list[int] = []
            if t == 0:
                memory, lost = self._plant(programs, memory, symbols)
            agents = {b: memory.agents[b] for b in going_on.tolist()}
            if t > 0:
                lost = self._descend(programs, agents, history.latest, symbols, t)
            if t > 0 or self.model.initial_observation:
                self._count(memory, symbols, lost)
            deprived = memory.deprived.copy()
            deprived[lost] = True
            actions = decided(self.model, history, lambda _: self._plan([*agents.values()], t))
            return actions, replace(memory, deprived=deprived)

    def _count(self, memory: Trees, symbols: list[Symbol], lost: list[int]) -> None:
        self.deprivation.updates += len(symbols)
        self.deprivation.looks += sum(any(v != UNSEEN for v in symbol.value) for symbol in symbols)
        self.deprivation.deprived += len(lost)
        self.deprivation.episodes_deprived += int((~memory.deprived[lost]).sum())

    def _plant(self, programs: Generative, memory: Trees, symbols: list[Symbol]) -> tuple[Trees, list[int]]:
        """Agents with a belief about `s_0`, and which of them had none left by what was seen at time 0."""
        B, N = len(memory.prior), self.num_particles
        c = torch.multinomial(memory.prior, N, replacement=True)  # [B, N]
        state = programs.initial(c.flatten())
        x = self.rows.of(state).reshape(B, N, -1)
        before = memory.prior.log()[:, None].expand(B, N, -1)
        known = before.clone()
        lost = []
        if self.model.initial_observation:
            percept = programs.observe(state, c.flatten())
            known += PerceptDensity(programs)(state, percept).view(B, N, -1)
            foreseen = self.binning.symbols(percept)
            for b in range(B):
                alike = [n for n in range(N) if foreseen[b * N + n] == symbols[b]]
                if not alike:
                    lost.append(b)
                    known[b] = before[b]
                    continue
                n = torch.tensor(alike)[torch.randint(len(alike), (N,))]
                x[b], c[b], known[b] = x[b, n], c[b, n], known[b, n]
        beliefs = map(particles, x, c, [0] * B, known)
        agents = tuple(agent(belief, self.model.horizon, self.choices) for belief in beliefs)
        return replace(memory, agents=agents), lost

    def _descend(
        self,
        programs: Generative,
        agents: Mapping[int, pomdp_py.Agent],
        seen: Percept,
        symbols: list[Symbol],
        time: int,
    ) -> list[int]:
        """Bring trees and beliefs up to date, in some of the episodes, by their numbers.

        Returns those whose belief was lost, and replaced.
        """
        assert seen.action is not None
        before = {b: each.belief for b, each in agents.items()}
        actions, lost = seen.action.tolist(), []
        updating = self._planner(time)
        with redirect_stdout(io.StringIO()):  # pomdp-py reports when it fills up particles
            for (b, each), symbol in zip(agents.items(), symbols, strict=True):
                choice = self.choices.choices[actions[b]]
                each.update_history(choice, symbol)
                try:
                    updating.update(each, choice, symbol)
                except ValueError as error:
                    if "deprivation" not in str(error):
                        raise
                    lost.append(b)
        pushed = self._pushed(programs, [before[b] for b in lost], seen.action[lost], time) if lost else []
        for b, belief in zip(lost, pushed, strict=True):
            agents[b].tree = None
            agents[b].set_belief(belief)
        return lost

    def _pushed(
        self, programs: Generative, beliefs: list[pomdp_py.Particles], action: Tensor, time: int
    ) -> list[pomdp_py.Particles]:
        """Beliefs moved by actions `[B]`, whatever was seen but that the episode goes on."""
        states = [state for belief in beliefs for state in belief.particles]
        sizes = [len(belief.particles) for belief in beliefs]
        x = torch.tensor([state.row for state in states], dtype=torch.float64, device=self.rows.device)
        c = torch.tensor([state.context for state in states], device=self.rows.device)
        a = action.repeat_interleave(torch.tensor(sizes, device=action.device))
        known = torch.tensor([state.log_posterior for state in states], dtype=torch.float64)
        moved = programs.move(self.rows.state(x), a, c)
        ended = torch.zeros_like(c, dtype=torch.bool) if moved.ended is None else moved.ended
        columns = self.rows.of(moved.state), c, known, ended
        parts = zip(*(column.split(sizes) for column in columns), strict=True)
        return [particles(x[n], c[n], time, known[n]) for x, c, known, n in map(_going_on, parts)]


def _going_on(part: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A belief's states, contexts and log-posteriors, `[N, …]`, and which N of them to keep, `[N]`.

    Those of states with which the episode would have ended, the last entry, are replaced by others.
    """
    x, c, known, ended = part
    left = (~ended).nonzero()[:, 0]
    n = torch.arange(len(c), device=c.device)
    if 0 < len(left) < len(c):
        n = torch.where(ended, left[torch.randint(len(left), c.shape, device=c.device)], n)
    return x, c, known, n


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Trees have no cycles, but are large, and to search them for cycles again and again takes its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
