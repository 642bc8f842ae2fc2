"""Playing episodes in batch: the one loop over time."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from torch import Tensor

from cpomdp_ppl.actions import Reshaped, require_actions, some_action
from cpomdp_ppl.arrays import as_indices, filled, how_many_fit, pieces
from cpomdp_ppl.episodes import Episodes
from cpomdp_ppl.errors import ModelError, invalid, require, require_count, require_model
from cpomdp_ppl.handlers import Batched, Recorded, mask_of
from cpomdp_ppl.policy import Decision, History, Percept, Policy, UniformActions, as_policy
from cpomdp_ppl.prior import as_prior
from cpomdp_ppl.rng import inverse_cdf, isolated
from cpomdp_ppl.signature import read_signature
from cpomdp_ppl.state import leaves, map_state

CELLS_AT_ONCE = 2**15
"""States whose rewards are computed together."""

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.signature import Signature


def simulate(
    model: CPOMDP,
    policy: Policy | Callable[[History], Decision],
    num_episodes: int,
    *,
    contexts: int | str | Sequence[int | str] | Tensor | None = None,
    prior: Sequence[float] | Tensor | None = None,
    seed: int | None = None,
) -> Episodes:
    """Draw episodes, all at once; the only loop is over time.

    Args:
        model: The CPOMDP.
        policy: The policy that acts: a `Policy`, or a function from a `History` to actions.
        num_episodes: How many episodes B.
        contexts: The true contexts, by index or name: one for all, one for each episode `[B]`, or
            `"balanced"` for each context equally often (as far as B allows). Left out, they are drawn from
            the prior.
        prior: Prior over contexts, `[C]`, or one for each episode `[B, C]`; the model's if left out.
        seed: The same seed gives the same episodes; left out, fresh entropy is taken. The caller's
            random number generators, param store and validation flags stay as they were, and handlers
            around this call see nothing of it.

    Returns:
        The episodes, with everything about them known.

    Raises:
        ValueError: On arguments that make no sense, or a policy that returns impossible actions.
        ModelError: If the model is incomplete, or produced something that is not finite.

    Examples:
        >>> from cpomdp_ppl import RandomPolicy
        >>> from cpomdp_ppl.models import LightDark
        >>> model = LightDark()
        >>> simulate(model, RandomPolicy(model.actions), 1000, contexts="balanced", seed=0)
        Episodes(B=1000, T=20, sites=['z'], known=['contexts', 'states', 'rewards', 'returns'], device='cpu')
    """
    require_model(model)
    B = require_count("num_episodes", num_episodes)
    with (
        isolated(seed),
        torch.no_grad(),
        poutine.block(),
        model.running(),
        Batched((B,), model.max_plate_nesting),
    ):
        p = model.prior()
        if prior is not None:
            p = as_prior(prior, model.num_contexts, B).to(p)
        c = _contexts(contexts, p, model, B)
        episodes = rollout(model, policy, c, p, to_the_horizon=False)
    require_finite_episodes(model, episodes)
    return episodes


def _contexts(contexts: Any, prior: Tensor, model: CPOMDP, B: int) -> Tensor:
    C = model.num_contexts
    if contexts is None:
        u = torch.rand(B, *[1] * (prior.dim() - 1), dtype=prior.dtype, device=model.device)
        return inverse_cdf(prior, u).reshape(B)  # `multinomial` is many times slower
    if isinstance(contexts, str) and contexts == "balanced":
        return torch.arange(B, device=model.device) % C
    if isinstance(contexts, str):
        known = contexts in model.context_names
        require(known, "contexts", contexts, f'"balanced" or a name out of {list(model.context_names)}')
    c = as_indices("contexts", contexts, model.context_names).to(model.device)
    require(c.shape in ((), (B,)), "contexts", list(c.shape), f"a single index or shape [{B}]")
    low, high = (int(extreme) for extreme in c.aminmax())
    require(low >= 0 and high < C, "contexts", f"indices from {low} to {high}", f"indices 0 to {C - 1}")
    return c.expand(B)


def require_finite_episodes(model: CPOMDP, episodes: Episodes) -> None:
    """Raise if a program produced a number that is not finite."""
    produced: list[tuple[str, str, Any, int]] = [("reward", "the reward", episodes.rewards, 0)]
    produced += [("transition", f"'{name}'", leaf, 0) for name, leaf in leaves(episodes.states)]
    for site, values in (episodes.initial_observations or {}).items():
        produced.append(("observation", f"site '{site}'", values[:, None], 0))
    produced += [("observation", f"site '{site}'", seen, 1) for site, seen in episodes.observations.items()]
    faults = []
    for method, what, values, first in produced:
        if values.is_floating_point() and not bool(torch.isfinite(values.sum())):
            if bool(torch.isfinite(values).all()):  # the sum itself overflowed
                continue
            b, t = (~torch.isfinite(values)).nonzero()[0, :2].tolist()
            context = model.context_names[int(episodes.contexts[b])]  # type: ignore[index]
            wrong = values[b, t][~torch.isfinite(values[b, t])][0]
            program = "initial" if method == "transition" and t == 0 else method
            faults.append(
                f"{program}: {what} is {wrong} at time {t + first} of episode {b} "
                f"in context '{context}'; it must be finite"
            )
    if faults:
        raise ModelError(type(model).__name__, faults)


def require_chances(model: CPOMDP, chances: Tensor) -> None:
    """Raise unless what `ends` returned are probabilities."""
    bad = ~((chances >= 0) & (chances <= 1))
    if bool(bad.any()):
        fault = f"ends: is {chances[bad][0]:.6g}; return truth values, or probabilities from 0 to 1"
        raise ModelError(type(model).__name__, [fault])


def rollout(
    model: CPOMDP,
    policy: Policy | Callable[[History], Decision],
    context: Tensor,
    prior: Tensor,
    *,
    to_the_horizon: bool = True,
) -> Episodes:
    """Play episodes from the first state to their end.

    The caller decides how sites are broadcast to the episodes (by a plate, or `Batched`), which handlers
    see them, and where random numbers come from.

    Args:
        model: The CPOMDP.
        policy: The policy that acts.
        context: The true contexts, `[B]`, or a scalar for a single episode without an episode axis.
        prior: What the agent believes beforehand, `[C]` or `[B, C]`.
        to_the_horizon: Whether programs run to the horizon even if all episodes are over before, so that
            there are the same sites in each call.
    """
    policy = as_policy(policy)
    sig = read_signature(model)
    S = context.shape  # the engine's axes: [B] or []
    plate_axes = (1,) * model.max_plate_nesting
    c = context.reshape(S + plate_axes)
    B = S[0] if S else 1
    own = some_action(model).shape

    # What a policy samples is hidden from handlers outside; what it learns (its params) is not.
    private = poutine.block(hide_types=["sample", "observe"])

    with Recorded(0):
        state = sig.broadcast(model.initial(c), S)
    percept = blind(sig, B, context.device)
    if model.initial_observation:
        with Recorded(0) as seen:
            model.percept(state, None, c)
        percept = percept_of(sig, seen, None, S)

    history = History((percept,))
    with private:
        memory = policy.start(prior.expand(B, model.num_contexts))
    states, can_end = [state], model.can_end
    lengths = torch.full((B,), 0 if can_end else model.horizon, device=context.device)
    alive = torch.ones(B, dtype=torch.bool, device=context.device)
    for t in range(model.horizon):
        if can_end and not (to_the_horizon or bool(alive.any())):
            history = history.extended(history.latest.only(alive))
            states.append(state)
            continue
        # What is drawn for episodes that are over counts for nothing, and nobody sees it.
        counting = alive.reshape(S + plate_axes) if can_end else None
        going_on = nullcontext() if counting is None else poutine.mask(mask=counting)  # type: ignore[call-overload]
        with private:
            decision, memory = policy.act(history, memory)
        with going_on:
            a = pyro.sample(f"a_{t}", action_site(decision, model, S, plate_axes))
            if model.box is not None:
                require_actions("policy", a, model)
            with Recorded(t + 1):
                state = sig.broadcast(model.transition(state, a, c), S)
            with Recorded(t + 1) as seen:
                model.percept(state, a, c)
        states.append(state)
        taken = by_episode(a, S, plate_axes + a.shape[len(S + plate_axes) :]).reshape(B, *own)
        history = history.extended(percept_of(sig, seen, taken, S))
        if can_end:
            lengths += alive
            alive = alive & ~history.latest.ended

    path = map_state(lambda *leaves: torch.stack(leaves), *states)  # leaves [T + 1, B, …]
    by_time = map_state(
        lambda leaf, values: values.movedim(0, len(S)).reshape(B, -1, *leaf.shape), sig.state, path
    )
    return _recorded(model, context, history, lengths, by_time, _rewards(model, path, history.actions, c))


def _recorded(
    model: CPOMDP, context: Tensor, history: History, lengths: Tensor, states: Any, rewards: Tensor
) -> Episodes:
    """All that happened, as episodes."""
    first = history.percepts[0]
    return Episodes(
        actions=history.actions,
        lengths=lengths,
        observations={site: values[:, 1:] for site, values in history.observations.items()},
        observed={site: flags[:, 1:] for site, flags in history.observed.items()},
        contexts=context.reshape(len(lengths)),
        states=states,
        rewards=rewards,
        initial_observations=first.observations if model.initial_observation else None,
        initially_observed=first.observed if model.initial_observation else None,
        discount=model.discount,
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
        value = site["value"].to(spec.dtype)  # before the first action it may be of another
        mask = mask_of(site)
        if not isinstance(mask, Tensor):
            mask = torch.as_tensor(mask, device=value.device)
        flags = by_episode(mask, S, spec.plates)
        observations[name] = filled(by_episode(value, S, spec.shape), flags)
        observed[name] = flags
    return Percept(action, observations, observed)


def _rewards(model: CPOMDP, path: Any, actions: Tensor, c: Tensor) -> Tensor:
    """Rewards `[B, T]` of states with leaves `[T + 1, B, …]` and actions `[B, T, …]`, many steps in a call.

    Many steps in a call save the cost of calls; too many do not fit in the cache, which costs more.
    """
    B, T = actions.shape[:2]
    a = actions.movedim(1, 0).reshape(T, *c.shape, *actions.shape[2:])
    rewards = []
    for times in pieces(T, how_many_fit(CELLS_AT_ONCE, B)):
        states = map_state(lambda leaf, times=times: leaf[times], path)
        arrival: tuple[Any, ...] = ()
        if model.pays_on_arrival:
            later = slice(times.start + 1, times.stop + 1)
            arrival = (map_state(lambda leaf, times=later: leaf[times], path),)
        reward = as_reward(model.reward(states, a[times], c[None], *arrival))
        rewards.append(reward.expand(times.stop - times.start, *c.shape))
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


def action_site(decision: Decision, model: CPOMDP, S: torch.Size, plate_axes: tuple[int, ...]) -> Any:
    """A decision as the distribution of the action site, with the engine's axes.

    Raises:
        ValueError: If the policy decided for anything that is no action, or no distribution over actions.
    """
    B = S[0] if S else 1
    if model.box is not None:
        return _continuous_site(decision, model, B, S + plate_axes)
    num_actions = model.num_actions
    if isinstance(decision, torch.distributions.Categorical):
        shape = decision.param_shape
        if shape != (B, num_actions):
            raise invalid("policy", f"logits of shape {list(shape)}", f"shape [{B}, {num_actions}]")
        if not isinstance(decision, UniformActions):
            _require_probabilities(decision)
        if S + plate_axes == (B,) and isinstance(decision, dist.Categorical):
            return decision
        axes = S + plate_axes + (num_actions,)
        if "probs" in vars(decision):  # the logits that torch makes of a probability of 0 are finite
            return dist.Categorical(probs=decision.probs.reshape(axes))
        return dist.Categorical(logits=decision.logits.reshape(axes))
    if not isinstance(decision, Tensor):
        raise invalid("policy", decision, "actions [B] or a Categorical over them")
    if decision.is_floating_point() or decision.dtype == torch.bool or decision.shape != (B,):
        found = f"{decision.dtype} of shape {list(decision.size())}"
        raise invalid("policy", found, f"int64 actions of shape [{B}]")
    lowest, highest = (int(extreme) for extreme in decision.aminmax())
    if lowest < 0 or highest >= num_actions:
        raise invalid("policy", f"actions from {lowest} to {highest}", f"actions 0 to {num_actions - 1}")
    return dist.Delta(decision.long().reshape(S + plate_axes))


def _continuous_site(decision: Decision, model: CPOMDP, B: int, axes: tuple[int, ...]) -> Any:
    """As `action_site`, of continuous actions."""
    box = model.box
    assert box is not None
    if isinstance(decision, torch.distributions.Distribution):
        shapes = decision.batch_shape, decision.event_shape
        if shapes != ((B,), (box.dim,)):
            found = f"a distribution of batch shape {list(shapes[0])} and event shape {list(shapes[1])}"
            raise invalid("policy", found, f"batch shape [{B}] and event shape [{box.dim}]")
        return Reshaped(decision, axes)
    if not isinstance(decision, Tensor):
        raise invalid("policy", decision, f"actions [B, {box.dim}], or a distribution over them")
    if not decision.is_floating_point() or decision.shape != (B, box.dim):
        found = f"{decision.dtype} of shape {list(decision.size())}"
        raise invalid("policy", found, f"real actions of shape [{B}, {box.dim}]")
    actions = decision.to(torch.get_default_dtype())  # as programs have it, and not the policy
    return dist.Delta(actions.reshape(*axes, box.dim), event_dim=1)


def _require_probabilities(decision: torch.distributions.Categorical) -> None:
    by_probability = "probs" in vars(decision)  # what is not given is computed only when it is asked for
    lowest = float((decision.probs if by_probability else decision.logits).min())  # NaN if any is
    if not lowest >= (0.0 if by_probability else -math.inf):
        what = "probabilities" if by_probability else "logits"
        raise invalid("policy", f"{what} as low as {lowest}", "proper probabilities")
