"""A search for lucky episodes, without any filter: where rewards are, how far, and how to get there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpomdp_ppl.actions import probes, random_actions
from cpomdp_ppl.episodes import Episodes
from cpomdp_ppl.generative import Generative, Tally
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.rng import inverse_cdf
from cpomdp_ppl.state import leaves, map_state
from solvers.cids.playing import where

if TYPE_CHECKING:
    from cpomdp_ppl import CPOMDP

FEWEST_ROUNDS, MOST_ROUNDS = 3, 24
"""How often episodes are played: anew at first, later from where the search has been."""
AT_ONCE = 2048
"""About how many episodes a round plays."""
RUNS = (1, 3, 10, 30)
"""How many times in a row, on average, random actions are repeated."""
KEPT = 32
"""Episodes that are kept, at most, of each context."""
TRIALS = 32
"""How often actions that are fixed in advance are tried."""
CELL = 0.5
"""Size of the cells in which places count as the same, in standard deviations of the first round."""
FAR = 0.1
"""Goals are far if this share of what there is to win over chance takes more than one action."""
LARGE_PRIME = 1_000_000_007
MOST_DIRECTIONS = 4
"""Of a state of more numbers, places are told apart by so many random combinations."""


@dataclass(frozen=True, eq=False)
class Findings:
    """What a search found.

    Attributes:
        prior: Prior over contexts, `[C]`, that averages are over.
        episodes: The luckiest ones of every context in which some were luckier than others; nothing is
            observed in them.
        plans: The actions, fixed in advance, that earned most in each context, `[C, T, …]`.
        leads: Actions that lead to all sorts of places, `[K, T, …]`, and after how many of them one is there,
            `[K]`.
        run_length: How long actions should be repeated: the shortest runs of the luckiest episodes.
        constant: The best return, on average, of doing the same thing all the time.
        constant_told: The same for who is told the context.
        random: What random actions earned, repeated for shorter or longer runs.
        worth: What it may be worth to know the context: how much better than `constant` are, on average,
            lucky episodes, or actions that are fixed in advance for each context.
        unit: The median size of rewards that are not zero.
    """

    prior: Tensor
    episodes: Episodes | None
    plans: Tensor
    leads: tuple[Tensor, Tensor]
    run_length: float
    constant: float
    constant_told: float
    random: float
    worth: float
    unit: float

    @property
    def is_far(self) -> bool:
        """Whether it takes more than doing the same thing all the time to reach rewards, told the context."""
        best = self.constant + self.worth
        return self.episodes is not None and best - self.constant_told > FAR * (best - self.random)


@torch.no_grad()
def search(model: CPOMDP, prior: Tensor | None = None, seed: int = 0) -> Findings:
    """Look for episodes of high return, told nothing and filtering nothing: a step costs next to nothing.

    The first round has random actions, repeated for shorter or longer runs. Each further one goes back to
    moments of earlier rounds, half of them where it has hardly been, half of them on the way of the best
    episodes, and on from there. Luck is what pays more than doing the same thing all the time. The search
    goes on while there is a context without any. Averages are over a prior `[C]`, the model's if left out.
    """
    C, T = model.num_contexts, model.horizon
    contexts = torch.arange(max(AT_ONCE // C, 32) * C, device=model.device) % C
    with inference_scope(model, seed):
        programs = Generative(model)
        tried = probes(model)
        every = tried[:, None, None].expand(-1, C, T, *tried.shape[1:])  # [A, C, T, …]
        always = _returns_of(programs, every.flatten(0, 1), C)  # [A, C]
        runs = torch.tensor(RUNS, device=model.device)[torch.arange(len(contexts)) // C % len(RUNS)]
        found = _played(programs, contexts, runs, None)
        assert found.rewards is not None
        assert found.returns is not None
        by_chance = found.returns.double().view(-1, C).mean(0)  # [C]
        sizes = found.rewards[found.rewards != 0].abs()
        cells, enough = Cells.of(found), _enough(always)
        run_length = _best_run(found, runs, enough)
        for number in range(1, MOST_ROUNDS):
            if number >= FEWEST_ROUNDS and bool((_lucky(found, enough).sum(0) >= KEPT).all()):
                break
            start = _starts(found, cells, contexts)
            runs = runs[torch.randperm(len(runs), device=runs.device)]
            found = _pool(Episodes.concatenate([found, _played(programs, contexts, runs, start)]), cells, C)
        kept = best(found, C)
        plans = torch.cat([every, kept.lasting_actions.unflatten(0, (C, -1)).transpose(0, 1)])  # [P, C, T, …]
        worths = torch.cat([always, _returns_of(programs, plans[len(every) :].flatten(0, 1), C)])  # [P, C]
        rows, until = cells.earliest(found)
    assert kept.returns is not None
    p = (model.prior() if prior is None else prior).detach().double()
    constant = (always @ p).max()
    lucky_returns = kept.returns.double().view(C, -1).mean(1)  # [C]
    informed = torch.maximum(worths.amax(0), lucky_returns) @ p
    lucky = _lucky(kept, enough).any(1)
    return Findings(
        p,
        kept[lucky] if bool(lucky.any()) else None,
        plans[worths.argmax(0), torch.arange(C)],
        (found.actions[rows], until.clamp(max=T - 1)),
        run_length,
        float(constant),
        float(always.amax(0) @ p),
        float(by_chance @ p),
        max(float(informed - constant), 0.0),
        float(sizes.median()) if len(sizes) else 0.0,
    )


def _enough(always: Tensor) -> Tensor:
    """The least return that is luck in each context, `[C]`, given those of doing the same thing `[A, C]`."""
    best = always.amax(0)
    return best + 1e-3 * (always.amax(0) - always.amin(0)) + 1e-6 * (1 + best.abs())


def _lucky(episodes: Episodes, enough: Tensor) -> Tensor:
    """Which episodes were lucky in which context, bool `[B, C]`."""
    assert episodes.returns is not None
    assert episodes.contexts is not None
    there = torch.nn.functional.one_hot(episodes.contexts, len(enough)).bool()
    return there & (episodes.returns.double()[:, None] > enough)


def _returns_of(programs: Generative, actions: Tensor, C: int) -> Tensor:
    """Mean returns of actions fixed in advance, `[P C, T, …]` with contexts last: float64 `[P, C]`."""
    contexts = torch.arange(C, device=actions.device).repeat(len(actions) // C * TRIALS)
    plans = actions.repeat(TRIALS, *[1] * (actions.dim() - 1))
    state = programs.initial(contexts)
    tally = Tally(programs.model, contexts)
    for t in range(plans.shape[1]):
        moved = programs.move(state, plans[:, t], contexts)
        state = moved.state
        tally.add(moved)
    return tally.returns.view(TRIALS, -1, C).mean(0)


def _best_run(episodes: Episodes, runs: Tensor, enough: Tensor) -> float:
    """The shortest runs that were lucky half as often as any; if none was, rather long ones."""
    lucky = _lucky(episodes, enough).any(1).double()
    often = torch.stack([lucky[runs == run].mean() for run in RUNS])
    if not bool(often.any()):
        return float(RUNS[-2])
    return float(RUNS[int((often >= 0.5 * often.max()).nonzero()[0])])


@dataclass(frozen=True, eq=False)
class Cells:
    """Places, told apart by rounding."""

    scale: Tensor  # [D]
    directions: Tensor | None  # [D, K]

    @staticmethod
    def of(episodes: Episodes) -> Cells:
        """Cells for the states of these episodes."""
        flat = _flat(episodes)
        sd = flat.flatten(0, 1).std(0)
        numbered = [
            not leaf.is_floating_point()
            for _, leaf in leaves(episodes.states)
            for _ in range(leaf[0, 0].numel())
        ]
        # States that are numbered have nothing to do with their neighbours: each is a place of its own.
        sd = torch.where(torch.tensor(numbered, device=sd.device), 1 / CELL, sd)
        D = flat.shape[-1]
        directions = torch.randn(D, MOST_DIRECTIONS).to(flat) / D**0.5 if D > MOST_DIRECTIONS else None
        return Cells(torch.where(sd > 1e-9, CELL * sd, 1.0), directions)

    def rarity(self, episodes: Episodes) -> Tensor:
        """One over how often a moment's place was visited in its context, `[B, T + 1]`."""
        assert episodes.contexts is not None
        _, inverse, counts = self._places(episodes).unique(return_inverse=True, return_counts=True)
        rarity: Tensor = 1.0 / counts[inverse]
        return rarity

    def earliest(self, episodes: Episodes) -> tuple[Tensor, Tensor]:
        """The soonest visit to each place in each context: its episode and its time, `[K]` each."""
        places = self._places(episodes)  # [B, T + 1]
        B = len(places)
        in_time = places.T.flatten()  # earlier moments first
        _, inverse = in_time.unique(return_inverse=True)
        first = torch.full((int(inverse.max()) + 1,), len(in_time), device=places.device)
        first = first.scatter_reduce(0, inverse, torch.arange(len(in_time), device=places.device), "amin")
        return first % B, first // B

    def _places(self, episodes: Episodes) -> Tensor:
        """A number for the context and the place of every moment, `[B, T + 1]`."""
        flat = _flat(episodes) / self.scale
        if self.directions is not None:
            flat = flat @ self.directions
        assert episodes.contexts is not None
        places = episodes.contexts[:, None].expand(flat.shape[:2])
        for axis in flat.floor().long().unbind(-1):
            places = places * LARGE_PRIME + axis  # wraps around, and hardly ever meets another place
        return places


def _flat(episodes: Episodes) -> Tensor:
    """States with all their numbers on one axis, `[B, T + 1, D]`.

    After the end of an episode, the last one that it went on from stays: nothing starts anywhere else.
    """
    parts = [leaf.reshape(*leaf.shape[:2], -1).double() for _, leaf in leaves(episodes.states)]
    flat = torch.cat(parts, -1)
    lengths, T = episodes.lengths, episodes.horizon
    if bool((lengths == T).all()):
        return flat
    last = torch.where(lengths < T, lengths - 1, T)
    moments = torch.minimum(torch.arange(T + 1, device=last.device), last[:, None])  # [B, T + 1]
    return flat.gather(1, moments[..., None].expand_as(flat))


def _starts(found: Episodes, cells: Cells, contexts: Tensor) -> tuple[Episodes, Tensor]:
    """Episodes to go back to in contexts `[B]`, and the times `[B]` up to which they are kept.

    Half of them leads to where the search has hardly been, the others are on the way of the best.
    """
    assert found.contexts is not None
    assert found.returns is not None
    T = found.horizon
    rarity = cells.rarity(found)[:, :T].square() * found.alive  # [F, T]
    ranks = found.returns.double().argsort().argsort().double() / len(found)
    lucky = ((ranks >= 0.8).double()[:, None] + 1e-9) * found.alive
    rows, times = torch.empty_like(contexts), torch.empty_like(contexts)
    for c in found.contexts.unique().tolist():
        there = (found.contexts == c).nonzero()[:, 0]
        wanted = (contexts == c).nonzero()[:, 0]
        parts = wanted.chunk(2)
        for part, weights in zip(parts, (rarity[there], lucky[there]), strict=False):
            levels = torch.rand(len(part), dtype=torch.float64, device=part.device)
            index = inverse_cdf(weights.flatten(), levels)
            rows[part], times[part] = there[index // T], index % T
    return found[rows], times


def _played(
    programs: Generative, contexts: Tensor, runs: Tensor, start: tuple[Episodes, Tensor] | None
) -> Episodes:
    """Episodes of random actions, repeated for runs of a mean length `[B]`; the first steps may be given."""
    model, B = programs.model, len(contexts)
    T = model.horizon
    state = programs.initial(contexts)
    if start is not None:
        given, until = start
        earned: Any = given.rewards
        state = map_state(lambda leaf: leaf[:, 0], given.states)
    action = random_actions(model, (B,))
    alive, lengths = torch.ones_like(contexts, dtype=torch.bool), torch.zeros_like(contexts)
    states, actions, rewards = [state], [], []
    for t in range(T):
        other = random_actions(model, (B,))
        action = where(torch.rand(B, device=contexts.device) < 1 / runs, other, action)
        if start is not None:
            action = where(t < until, given.actions[:, t], action)
        moved = programs.move(state, action, contexts)
        state = moved.state
        reward, ended = moved.reward, moved.ended
        if start is not None:
            kept = t < until
            state = map_state(lambda new, old: where(kept, old[:, t + 1], new), state, given.states)  # noqa: B023
            reward = torch.where(kept, earned[:, t], reward)
            ended = None if ended is None else ended & ~kept
        lengths += alive
        alive = alive if ended is None else alive & ~ended
        states.append(state)
        actions.append(action)
        rewards.append(reward)
    return Episodes(
        actions=torch.stack(actions, 1),
        observations={},
        observed={},
        lengths=lengths,
        contexts=contexts,
        states=map_state(lambda *each: torch.stack(each, 1), *states),
        rewards=torch.stack(rewards, 1),
        discount=model.discount,
        zeroed=True,
    )


def best(episodes: Episodes, C: int) -> Episodes:
    """The best few of each context, context by context."""
    assert episodes.returns is not None
    return episodes[_top(episodes, episodes.returns.double(), C, KEPT)]


def _pool(episodes: Episodes, cells: Cells, C: int) -> Episodes:
    """Those worth going back to: the best, and those that have been where the others have not."""
    assert episodes.returns is not None
    half = max(AT_ONCE // C // 2 + 1, KEPT)  # as many as are kept, so that every context has as many
    best = _top(episodes, episodes.returns.double(), C, half)
    rare = _top(episodes, cells.rarity(episodes).amax(1), C, half)
    return episodes[torch.cat([best, rare]).unique()]


def _top(episodes: Episodes, scores: Tensor, C: int, number: int) -> Tensor:
    """Rows of the highest scores `[B]` of each context."""
    assert episodes.contexts is not None
    rows = []
    for c in range(C):
        mine = torch.eq(episodes.contexts, c).nonzero()[:, 0]
        rows.append(mine[scores[mine].topk(min(len(mine), number)).indices])
    return torch.cat(rows)
