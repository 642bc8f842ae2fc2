"""QMDP over contexts, and QMDP with a price on information about them.

Littman, Cassandra and Kaelbling, "Learning policies for partially observable environments: scaling up"
(1995), with a hidden context for what is to be revealed, and commitments for what is done thereafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.special import entr

from baselines.belief import Memory, conditioned, decided
from baselines.commitments import Commitment, going_on, plans, returns_of
from cpomdp_ppl.actions import require_finite_actions
from cpomdp_ppl.arrays import how_many_fit
from cpomdp_ppl.errors import as_integer, require, require_count, require_model, require_number
from cpomdp_ppl.generative import Generative
from cpomdp_ppl.inference import SMC, Cloud, Observed, ParticleFilter, inference_scope
from cpomdp_ppl.rng import require_seed, seed_for
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import History, Percept


NUMBERS_AT_ONCE = 2**18
"""Numbers of states and particles handled together."""


@dataclass(frozen=True, eq=False)
class QMDP:
    """Act as if the context were to be revealed after the next step; with a temperature, pay for finding out.

    At every step it takes the action that maximises

        Q(h, a) = Σ_c P(c | h) E[r_c(s_t, a) + γ V_c(s_{t+1}) | h, a, c]
                  + τ γ^{-t} E_o[H(C | h) − H(C | h, a, o)],

    where V is what the best of the commitments earns from there to the end: the best in each context, on
    average over the states that the context and the action lead to. Where the episode ends it is 0. Of equal
    actions it takes the first. Information is not discounted as rewards are: at time t, a unit of reward at
    the start is worth `γ^{-t}` of those that are earned then.

    With τ = 0, all uncertainty about the context is believed to vanish after one step, whatever is done. So
    nothing is worth finding out: Q does not depend on what can be seen, and to look is worth no more than to
    wait blindly in the same place. QMDP never looks on purpose. But it likes to wait for a revelation that
    does not come, and where to look is the only way to wait, as in Light–Dark, it looks by accident. The
    temperature repairs that as far as one step goes: it says what a nat of information about the context is
    worth, and the expected information of the next observation is added. That a move makes later
    observations more telling is still worth nothing; for that, search (`baselines.pft.PFT`).

    Args:
        model: The CPOMDP, of finitely many actions.
        commitments: What V chooses from: actions to repeat, by index or name, or functions from the time to
            one. Left out, every action.
        temperature: τ, in units of reward a nat, as rewards are worth at the start.
        num_particles: Particles for every context in the filter that follows the episode.
        outcomes: Observations J that are looked ahead to, for every action, with their contexts spread in
            proportion to the posterior; not needed without a temperature.
        states: States M for every context that V is a mean over, and that the likelihood of an observation
            ahead is, too. Noise in it passes for information, less and less as 1/M.
        chunk: How many episodes to handle at once; chosen to bound memory if left out. Chunks have random
            numbers of their own.
        seed: The same seed gives the same decisions; None takes fresh entropy.

    Examples:
        >>> from cpomdp_ppl.evaluation import evaluate
        >>> from cpomdp_ppl.models import LineGrid
        >>> model = LineGrid()
        >>> blind = evaluate(model, QMDP(model), 100)
        >>> paid = evaluate(model, QMDP(model, temperature=10.0), 100)
        >>> blind.entropy.mean, paid.entropy.mean < 0.5, paid.returns.mean > blind.returns.mean
        (1.0, True, True)
    """

    model: CPOMDP
    commitments: Sequence[Commitment] | None = None
    temperature: float = 0.0
    num_particles: int = 1000
    outcomes: int = 32
    states: int = 64
    chunk: int | None = None
    seed: int | None = 0

    def __post_init__(self) -> None:
        require_model(self.model)
        require_finite_actions(self.model, "QMDP")
        for name in ("num_particles", "outcomes", "states"):
            object.__setattr__(self, name, require_count(name, getattr(self, name)))
        if self.chunk is not None:
            object.__setattr__(self, "chunk", require_count("chunk", self.chunk))
        require_number("temperature", self.temperature, "a number, not negative")
        require_seed(self.seed)
        plans(self.model, self.commitments)

    def start(self, prior: Tensor) -> Memory:
        """The belief before anything was seen, from a prior over contexts `[B, C]`."""
        return Memory.first(self.model, prior, self.num_particles, seed_for(self.seed, 0))

    def act(self, history: History, memory: Memory) -> tuple[Tensor, Memory]:
        """Take in what was just seen, and take the best action.

        Raises:
            DegenerateWeightsError: If no context can have produced what was seen.
        """
        t = history.time
        memory = memory.caught_up(self.model, history, self.seed)
        price = self.temperature / self.model.discount**t

        def best(rows: Tensor | None) -> Tensor:
            some = memory.rows(rows)
            values = self.values(some, t)
            if price > 0:
                values += price * self.information(some, t)
            return values.argmax(1)

        return decided(self.model, history, best), memory

    def values(self, memory: Memory, time: int) -> Tensor:
        """What QMDP thinks of every action, without the information: Q for τ = 0, float64 `[B, A]`."""
        return self._by_parts(OneStep.values, memory, time, purpose=2)

    def information(self, memory: Memory, time: int) -> Tensor:
        """`E_o[H(C | h) − H(C | h, a, o)]` of every action in nats, float64 `[B, A]`.

        It is exactly 0 for actions after which nothing is seen.
        """
        return self._by_parts(OneStep.information, memory, time, purpose=3)

    def _by_parts(self, what: Quantity, memory: Memory, time: int, purpose: int) -> Tensor:
        """A quantity for all episodes, as many at once as memory allows."""
        proper = as_integer(time) is not None and 0 <= time < self.model.horizon
        require(proper, "time", time, f"0 to {self.model.horizon - 1}")
        with inference_scope(self.model, seed_for(self.seed, purpose, time)):
            ahead = OneStep(self, time)
            size = ahead.episodes_at_once if self.chunk is None else self.chunk
            return torch.cat([what(ahead, part) for part in memory.parts(size)])


class OneStep:
    """One step ahead of beliefs that are held at a time; to be made and used inside `inference_scope`."""

    def __init__(self, settings: QMDP, time: int) -> None:
        self.model, self.time = settings.model, time
        self.M, self.J, self.N = settings.states, settings.outcomes, settings.num_particles
        self.A = self.model.num_actions
        self.plans = plans(self.model, settings.commitments).to(self.model.device)
        self.filter: SMC = ParticleFilter(self.M).recursion(self.model)
        self.programs = Generative(self.model)

    @property
    def episodes_at_once(self) -> int:
        """As many as bound the memory that states and particles take."""
        size: int = sum(leaf.shape.numel() for _, leaf in leaves(self.filter.signature.state))
        cells = max(self.A * len(self.plans) * self.M, self.J * self.M, self.N)
        return how_many_fit(NUMBERS_AT_ONCE, self.model.num_contexts * cells * max(size, 1))

    def values(self, memory: Memory) -> Tensor:
        """`Σ_c P(c | h) (E[r_c(s, a)] + γ max_g E[what g earns from s'])`, `[B, A]`."""
        B, A = len(memory.log_posterior), self.A
        states = memory.belief.spread(self.M)  # [C, B, M, …], the same for every action
        states = map_state(lambda leaf: leaf.repeat_interleave(A, 1), states)  # [C, B·A, M, …]
        action = torch.arange(A, device=self.model.device).repeat(B)
        after = self.filter.move_states(states, action)
        alive = going_on(self.filter, after, action)
        returns = returns_of(self.plans, self.filter, after, torch.full_like(action, self.time + 1), alive)
        V = self.model.discount * returns.amax(2).view(-1, B, A).double()  # [C, B, A]
        every = action.view(B, A).unbind(1)
        r = torch.stack([memory.expected_reward(self.filter, a) for a in every], 1)  # [B, A]
        return r + torch.einsum("bc,cba->ba", memory.log_posterior.exp(), V)

    def information(self, memory: Memory) -> Tensor:
        """`H(C | h) − E_o[H(C | h, a, o)]`, `[B, A]`."""
        B = len(memory.log_posterior)
        rows = torch.arange(B, device=self.model.device)
        states, contexts = memory.belief.draw_jointly(memory.log_posterior, rows, self.J)  # [B·J, …], [B·J]
        beliefs = self.spread(memory.belief)
        before = memory.log_posterior.repeat_interleave(self.J, 0)  # [B·J, C]
        gains = []
        for a in range(self.A):
            percept = self.programs.step(states, torch.full_like(contexts, a), contexts).percept
            gains.append(self.gain(percept, beliefs, before).view(B, self.J).mean(1))
        return torch.stack(gains, 1)

    def spread(self, belief: Cloud) -> Any:
        """M states in every context for each of J outcomes, leaves `[C, B·J, M, …]`.

        All are drawn together, so that what one outcome's few states miss is among those of another.
        """

        def dealt(leaf: Tensor) -> Tensor:
            C, B, _, *event = leaf.shape
            return leaf.view(C, B, self.M, self.J, *event).movedim(3, 2).reshape(C, -1, self.M, *event)

        return map_state(dealt, belief.spread(self.M * self.J))

    def gain(self, percept: Percept, states: Any, before: Tensor) -> Tensor:
        """By how much the entropy over contexts falls for R agents when something is seen, `[R]`.

        `states` are their beliefs, leaves `[C, R, M, …]`; `before` is their `log P(c | h)`, `[R, C]`.
        """
        gain = torch.zeros_like(before[:, 0])
        seen = Observed.at(self.time + 1, percept.action, percept.observations, percept.observed)
        rows = torch.arange(len(gain), device=gain.device) if seen.rows is None else seen.rows
        if not len(rows):
            return gain
        before = before[rows]
        states = map_state(lambda leaf: leaf.index_select(1, rows), states)
        _, increment = self.filter.step(self.filter.of_states(states), seen.select(rows))
        after = conditioned(before, increment.T)
        return gain.index_copy_(0, rows, entr(before.exp()).sum(1) - entr(after.exp()).sum(1))


Quantity: TypeAlias = Callable[[OneStep, Memory], Tensor]
"""From beliefs of B episodes to a number for every action, `[B, A]`."""
