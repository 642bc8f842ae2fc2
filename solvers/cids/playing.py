"""Playing episodes with the filter inside the policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpomdp_ppl.actions import some_action
from cpomdp_ppl.arrays import on_the_right
from cpomdp_ppl.episodes import Episodes
from cpomdp_ppl.generative import Generative
from cpomdp_ppl.inference import Filtering
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.inference.knowledge import Knowledge
from cpomdp_ppl.rollout import require_finite_episodes
from cpomdp_ppl.state import map_state
from solvers.cids.belief_policy import Inputs
from solvers.cids.policy import no_actions

if TYPE_CHECKING:
    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.policy import Percept
    from solvers.cids.policy import Exploring


def where(condition: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Rows `[B, …]` of one tensor where a condition `[B]` holds, and of another elsewhere."""
    return torch.where(on_the_right(condition, one), one, other)


def expected_reward(known: Knowledge, action: Tensor) -> Tensor:
    """`E[r_c(s, a) | h, c]` of actions `[B]`, or `[B, D]`: `[B, C]`."""
    if known.model.box is not None:
        return known.expected_reward(action)
    rewards = known.expected_rewards  # [B, C, A], which is there already
    return rewards.gather(2, action[:, None, None].expand(*rewards.shape[:2], 1)).squeeze(2)


@dataclass(frozen=True, eq=False)
class Lead:
    """Actions that are given, `[B, T, …]`, and for how many steps, `[B]`, before a policy acts by itself."""

    actions: Tensor
    steps: Tensor

    def rows(self, rows: slice | Tensor) -> Lead:
        """Those of some episodes."""
        return Lead(self.actions[rows], self.steps[rows])


@dataclass(frozen=True, eq=False)
class Played:
    """Episodes, and what was known on the way.

    Attributes:
        episodes: What happened.
        filtering: What the filter made of it on the way.
        inputs: What the policy read before each decision.
        lost: Episodes that the filter could not follow to the end, as all its particles died, bool `[B]`.
    """

    episodes: Episodes
    filtering: Filtering
    inputs: Inputs
    lost: Tensor

    @staticmethod
    def joined(parts: list[Played]) -> Played:
        """Those of several parts, one after the other."""
        return Played(
            Episodes.concatenate([part.episodes for part in parts]),
            Filtering.concatenate([part.filtering for part in parts]),
            Inputs.joined([part.inputs for part in parts]),
            torch.cat([part.lost for part in parts]),
        )


@dataclass(frozen=True, eq=False)
class _Step:
    """One step of B episodes, and what was known before it."""

    state: Any  # before it
    known: Knowledge
    inputs: Inputs
    action: Tensor
    reward: Tensor
    expected: Tensor  # E[r_c(s_t, a_t) | h_t, c], [B, C]
    percept: Percept
    alive: Tensor  # which episodes had not ended before it, [B]


@torch.no_grad()
def play_out(
    model: CPOMDP,
    acting: Exploring,
    contexts: Tensor,
    prior: Tensor,
    lead: Lead | None,
    seed: int,
) -> Played:
    """Play episodes in contexts `[B]` with priors `[B, C]`, perhaps led for the first steps."""
    policy, previous = acting.policy, no_actions(some_action(model, contexts.shape))
    alive = torch.ones_like(contexts, dtype=torch.bool)
    steps: list[_Step] = []
    first = None
    with inference_scope(model, seed):
        programs = Generative(model)
        state = programs.initial(contexts)
        known = Knowledge.first(policy.backend, model, prior)
        if model.initial_observation:
            first = programs.observe(state, contexts)
            known = known.after(first)
        for t in range(model.horizon):
            if model.can_end and not bool(alive.any()):  # all stays as it is
                percept = steps[-1].percept.only(alive)
                steps.append(replace(steps[-1], state=state, known=known, percept=percept, alive=alive))
                continue
            inputs = policy.encoding(known)
            action = acting.draw(policy.decide(inputs), previous)
            if lead is not None:
                action = where(t < lead.steps, lead.actions[:, t], action)
            step = programs.step(state, action, contexts)
            percept = step.percept if step.ended is None else step.percept.only(alive)
            expected = expected_reward(known, action)
            steps.append(_Step(state, known, inputs, action, step.reward, expected, percept, alive))
            if step.ended is not None:
                alive = alive & ~step.ended
            state, previous, known = step.state, action, known.after(percept)
    return _recorded(model, contexts, first, steps, state, known)


def _recorded(
    model: CPOMDP,
    contexts: Tensor,
    first: Percept | None,
    steps: list[_Step],
    last_state: Any,
    last: Knowledge,
) -> Played:
    """Put the steps together."""

    def stacked(name: str) -> Tensor:
        return torch.stack([getattr(step, name) for step in steps], 1)

    percepts, alive = [step.percept for step in steps], stacked("alive")  # [B, T]
    sites = percepts[0].observations
    episodes = Episodes(
        actions=stacked("action"),
        observations={site: torch.stack([p.observations[site] for p in percepts], 1) for site in sites},
        observed={site: torch.stack([p.observed[site] for p in percepts], 1) for site in sites},
        lengths=alive.sum(1),
        contexts=contexts,
        states=map_state(lambda *leaves: torch.stack(leaves, 1), *(step.state for step in steps), last_state),
        rewards=stacked("reward"),
        initial_observations=None if first is None else first.observations,
        initially_observed=None if first is None else first.observed,
        discount=model.discount,
        zeroed=True,
    )
    require_finite_episodes(model, episodes)
    known = [*(step.known for step in steps), last]
    totals = torch.stack([each.track.log_likelihood.T for each in known], 1)  # [B, T + 1, C]
    ess = [each.ess for each in known[1:]]
    filtering = Filtering(
        # A context that is impossible stays so: -inf less -inf adds nothing.
        increments=totals.diff(dim=1).nan_to_num(nan=0.0, neginf=-torch.inf),
        initial_increment=totals[:, 0],
        expected_reward=torch.where(alive[..., None], stacked("expected").double(), 0.0),
        prior=model.prior(),
        ess=None if ess[0] is None else torch.stack(ess, 1),  # type: ignore[arg-type]
    )
    return Played(episodes, filtering, Inputs.stack([step.inputs for step in steps]), last.lost)
