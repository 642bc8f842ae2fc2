"""The episode itself: the one loop over time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from torch import Tensor

from cpomdp_ppl.episodes import Episodes, filled
from cpomdp_ppl.errors import ModelError, rejected
from cpomdp_ppl.handlers import Recorded, mask_of
from cpomdp_ppl.policy import Decision, History, Percept, Policy, UniformActions, as_policy
from cpomdp_ppl.signature import read_signature
from cpomdp_ppl.state import map_state

CELLS_AT_ONCE = 2**15
"""States whose rewards are computed together."""

if TYPE_CHECKING:
    from collections.abc import Callable

    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.signature import Signature


def rollout(
    model: CPOMDP, policy: Policy | Callable[[History], Decision], context: Tensor, prior: Tensor
) -> Episodes:
    """Play episodes from the first state to the horizon.

    Whoever calls this decides how sites are broadcast to the episodes (a plate, or `Batched`), who
    watches, and where random numbers come from.

    Args:
        model: The CPOMDP.
        policy: Who acts.
        context: The true contexts, `[B]`, or a scalar for a single episode without an episode axis.
        prior: What the agent believes beforehand, `[C]` or `[B, C]`.
    """
    policy = as_policy(policy)
    sig = read_signature(model)
    S = context.shape  # the engine's axes: [B] or []
    own = (1,) * model.max_plate_nesting
    c = context.reshape(S + own)
    B = S[0] if S else 1

    # What a policy samples is its own business; what it learns (its params) is not.
    private = poutine.block(hide_types=["sample", "observe"])

    with Recorded(0):
        state = sig.broadcast(model.initial(c), S)
    percept = blind(sig, B, context.device)
    if model.initial_observation:
        with Recorded(0) as seen:
            model.observation(state, None, c)
        percept = percept_of(sig, seen, None, S)

    history = History((percept,))
    with private:
        memory = policy.start(prior.expand(B, model.num_contexts))
    states = [state]
    for t in range(model.horizon):
        with private:
            decision, memory = policy.act(history, memory)
        a = pyro.sample(f"a_{t}", _action_site(decision, model.num_actions, S, own))
        with Recorded(t + 1):
            state = sig.broadcast(model.transition(state, a, c), S)
        with Recorded(t + 1) as seen:
            model.observation(state, a, c)
        states.append(state)
        history = history.extended(percept_of(sig, seen, by_episode(a, S, own).reshape(B), S))

    path = map_state(lambda *leaves: torch.stack(leaves), *states)  # leaves [T + 1, B, …]
    return Episodes(
        actions=history.actions,
        observations={site: values[:, 1:] for site, values in history.observations.items()},
        observed={site: flags[:, 1:] for site, flags in history.observed.items()},
        contexts=context.reshape(B),
        states=map_state(
            lambda leaf, values: values.movedim(0, len(S)).reshape(B, -1, *leaf.shape), sig.state, path
        ),
        rewards=_rewards(model, path, history.actions, c),
        initial_observations=percept.observations if model.initial_observation else None,
        initially_observed=percept.observed if model.initial_observation else None,
        zeroed=True,
    )


def blind(sig: Signature, B: int, device: torch.device) -> Percept:
    """What the agent has seen before it has seen anything."""
    return Percept(
        action=None,
        observations={
            name: torch.zeros((B, *site.shape), dtype=site.dtype, device=device)
            for name, site in sig.observations.items()
        },
        observed={
            name: torch.zeros((B, *site.plates), dtype=torch.bool, device=device)
            for name, site in sig.observations.items()
        },
    )


def percept_of(sig: Signature, seen: Recorded, action: Tensor | None, S: torch.Size) -> Percept:
    """What was seen, from the sites that an `observation` program visited in a batch of shape `S`."""
    if seen.sites.keys() != sig.observations.keys():
        fault = f"observation: has the sites {list(seen.sites)}, but {list(sig.observations)} for action 0"
        raise ModelError(sig.model, [fault])
    observations, observed = {}, {}
    for name, spec in sig.observations.items():
        site = seen.sites[name]
        value = site["value"]
        mask = mask_of(site)
        if not isinstance(mask, Tensor):
            mask = torch.as_tensor(mask, device=value.device)
        flags = by_episode(mask, S, spec.plates)
        observations[name] = filled(by_episode(value, S, spec.shape), flags)
        observed[name] = flags
    return Percept(action, observations, observed)


def _rewards(model: CPOMDP, path: Any, actions: Tensor, c: Tensor) -> Tensor:
    """Rewards `[B, T]` of states with leaves `[T + 1, B, …]` and actions `[B, T]`, many steps in a call.

    A program has a price per call; but what does not stay in cache costs more.
    """
    B, T = actions.shape
    at_once = max(1, CELLS_AT_ONCE // B)
    a = actions.T.reshape(T, *c.shape).split(at_once)
    states = [map_state(lambda leaf, t=t: leaf[t : min(t + at_once, T)], path) for t in range(0, T, at_once)]
    rewards = [
        as_reward(model.reward(s, a_s, c[None])).expand(a_s.shape) for s, a_s in zip(states, a, strict=True)
    ]
    return torch.cat(rewards).reshape(T, B).T


def by_episode(tensor: Tensor, S: torch.Size, shape: tuple[int, ...]) -> Tensor:
    """Broadcast to `[B, *shape]`; constants, and values given by `pyro.condition`, may have fewer axes."""
    if tensor.shape != S + shape:
        tensor = tensor.expand(S + shape)
    return tensor if S else tensor[None]


def as_reward(reward: Tensor | float) -> Tensor:
    """A reward as a real number: programs may well return a comparison, or a constant."""
    if isinstance(reward, Tensor) and reward.is_floating_point():
        return reward
    return torch.as_tensor(reward, dtype=torch.get_default_dtype())


def _action_site(decision: Decision, num_actions: int, S: torch.Size, own: tuple[int, ...]) -> Any:
    """A decision as the distribution of the action site, with the engine's axes."""
    B = S[0] if S else 1
    if isinstance(decision, torch.distributions.Categorical):
        shape = decision.param_shape
        if shape != (B, num_actions):
            raise rejected("policy", f"logits of shape {list(shape)}", f"shape [{B}, {num_actions}]")
        if not isinstance(decision, UniformActions):
            _require_probabilities(decision)
        if S + own == (B,) and isinstance(decision, dist.Categorical):
            return decision
        return dist.Categorical(logits=decision.logits.reshape(S + own + (num_actions,)))
    if not isinstance(decision, Tensor):
        raise rejected("policy", decision, "actions [B] or a Categorical over them")
    if decision.is_floating_point() or decision.dtype == torch.bool or decision.shape != (B,):
        found = f"{decision.dtype} of shape {list(decision.size())}"
        raise rejected("policy", found, f"int64 actions of shape [{B}]")
    lowest, highest = (int(extreme) for extreme in decision.aminmax())
    if lowest < 0 or highest >= num_actions:
        raise rejected("policy", f"actions from {lowest} to {highest}", f"actions 0 to {num_actions - 1}")
    return dist.Delta(decision.long().reshape(S + own))


def _require_probabilities(decision: torch.distributions.Categorical) -> None:
    by_probability = "probs" in vars(decision)  # what is not given is computed only when it is asked for
    lowest = float((decision.probs if by_probability else decision.logits).min())  # NaN if any is
    if not lowest >= (0.0 if by_probability else -math.inf):
        what = "probabilities" if by_probability else "logits"
        raise rejected("policy", f"{what} as low as {lowest}", "proper probabilities")
