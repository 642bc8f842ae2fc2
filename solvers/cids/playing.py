"""Playing episodes with the filter inside the policy, from the beginning or from moments on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpomdp_ppl.episodes import Episodes
from cpomdp_ppl.generative import Generative
from cpomdp_ppl.inference import Filtering
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.inference.knowledge import Knowledge
from cpomdp_ppl.rng import index_at
from cpomdp_ppl.rollout import require_finite
from cpomdp_ppl.state import map_state
from solvers.cids.belief_policy import Inputs

if TYPE_CHECKING:
    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.policy import Percept
    from solvers.cids.policy import Exploring


@dataclass(frozen=True, eq=False)
class Moments:
    """Moments of M episodes before a decision, each at a time of its own.

    Attributes:
        contexts: The true contexts, `[M]`.
        state: The true states, leaves `[M, …]`.
        previous: The actions that led here, `[M]`; -1 for none.
        known: What the agent knows.
    """

    contexts: Tensor
    state: Any
    previous: Tensor
    known: Knowledge

    def __len__(self) -> int:
        return len(self.contexts)

    @staticmethod
    def first(backend: Backend, model: CPOMDP, contexts: Tensor, prior: Tensor) -> Moments:
        """The moments at which episodes begin; to be called inside `inference_scope`."""
        programs = Generative(model)
        state = programs.initial(contexts)
        known = Knowledge.first(backend, model, prior)
        if model.initial_observation:
            known = known.after(programs.observe(state, contexts))
        return Moments(contexts, state, torch.full_like(contexts, -1), known)

    def rows(self, index: Tensor) -> Moments:
        """Some of them."""
        state = map_state(lambda leaf: leaf[index], self.state)
        return Moments(self.contexts[index], state, self.previous[index], self.known.rows(index))

    @staticmethod
    def joined(parts: list[Moments]) -> Moments:
        """Those of several parts, one after the other."""
        if len(parts) == 1:
            return parts[0]
        return Moments(
            torch.cat([part.contexts for part in parts]),
            map_state(lambda *leaves: torch.cat(leaves), *(part.state for part in parts)),
            torch.cat([part.previous for part in parts]),
            Knowledge.joined([part.known for part in parts]),
        )


@dataclass(frozen=True, eq=False)
class Played:
    """Episodes played on from moments, until the horizon is reached.

    Attributes:
        episodes: What happened. Steps are counted from where an episode was taken up, so that some end early.
        filtering: What the filter made of it on the way, with the prior of each moment's posterior.
        prior: That posterior, float64 `[B, C]`.
        previous: The action before each decision, `[B, T]`; -1 for none.
        inputs: What the policy read before each decision.
    """

    episodes: Episodes
    filtering: Filtering
    prior: Tensor
    previous: Tensor
    inputs: Inputs

    @staticmethod
    def joined(parts: list[Played]) -> Played:
        """Those of several parts, one after the other."""
        return Played(
            Episodes.concatenate([part.episodes for part in parts]),
            Filtering.concatenate([part.filtering for part in parts]),
            torch.cat([part.prior for part in parts]),
            torch.cat([part.previous for part in parts]),
            Inputs.joined([part.inputs for part in parts]),
        )


@dataclass(frozen=True, eq=False)
class _Step:
    """One step of B episodes, and what was known before it."""

    state: Any  # before it
    previous: Tensor
    known: Knowledge
    inputs: Inputs
    action: Tensor
    reward: Tensor
    expected: Tensor  # E[r_c(s_t, a_t) | h_t, c], [B, C]
    percept: Percept


@torch.no_grad()
def play_on(model: CPOMDP, acting: Exploring, moments: Moments, seed: int) -> Played:
    """Play episodes from moments to the horizon, all at once."""
    policy, contexts = acting.policy, moments.contexts
    state, previous, known = moments.state, moments.previous, moments.known
    steps = []
    with inference_scope(model, seed):
        programs = Generative(model)
        for _ in range(model.horizon):
            inputs = policy.encoding(known)
            probs = acting.probs(policy.decide(inputs), previous)  # [B, A]
            action = index_at(probs.double(), torch.rand(len(probs), 1, dtype=torch.float64).to(probs.device))
            step = programs.step(state, action, contexts)
            rewards = known.expected_rewards  # [B, C, A]
            expected = rewards.gather(2, action[:, None, None].expand(*rewards.shape[:2], 1)).squeeze(2)
            steps.append(_Step(state, previous, known, inputs, action, step.reward, expected, step.percept))
            state, previous, known = step.state, action, known.after(step.percept)
    return _recorded(model, contexts, steps, state, known)


def _recorded(
    model: CPOMDP, contexts: Tensor, steps: list[_Step], last_state: Any, last: Knowledge
) -> Played:
    """Put the steps together."""

    def stacked(name: str) -> Tensor:
        return torch.stack([getattr(step, name) for step in steps], 1)

    first = steps[0].known
    lengths = model.horizon - first.time  # [B]
    lengths = torch.where(last.lost, 0, lengths)
    percepts = [step.percept for step in steps]
    sites = percepts[0].observations
    episodes = Episodes(
        actions=stacked("action"),
        observations={site: torch.stack([p.observations[site] for p in percepts], 1) for site in sites},
        observed={site: torch.stack([p.observed[site] for p in percepts], 1) for site in sites},
        lengths=lengths,
        contexts=contexts,
        states=map_state(lambda *leaves: torch.stack(leaves, 1), *(step.state for step in steps), last_state),
        rewards=stacked("reward"),
        zeroed=True,
    )
    require_finite(model, episodes)
    alive = torch.arange(model.horizon, device=lengths.device) < lengths[:, None]  # [B, T]
    totals = torch.stack(
        [*(step.known.track.log_likelihood.T for step in steps), last.track.log_likelihood.T]
    )
    increments = totals.diff(dim=0).movedim(0, 1)  # [B, T, C]
    # A context that is impossible stays so: -inf less -inf adds nothing.
    increments = torch.where(alive[..., None], increments.nan_to_num(nan=0.0, neginf=-torch.inf), 0.0)
    ess = [known.ess for known in (*(step.known for step in steps[1:]), last)]
    filtering = Filtering(
        increments=increments,
        initial_increment=torch.zeros_like(first.prior),
        expected_reward=torch.where(alive[..., None], stacked("expected").double(), 0.0),
        prior=model.prior(),
        ess=None if first.ess is None else torch.stack(ess, 1),  # type: ignore[arg-type]
    )
    inputs = Inputs.stack([step.inputs for step in steps])
    return Played(episodes, filtering, first.log_posterior.exp(), stacked("previous"), inputs)
