"""The same recursions, fed one step at a time: what a deployed agent or a planner needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpomdp_ppl.errors import rejected, require, require_count
from cpomdp_ppl.inference.backend import checked, inferring, rows_observed
from cpomdp_ppl.inference.belief import map_belief
from cpomdp_ppl.inference.scoring import Seen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.model import CPOMDP


class OnlineFilter:
    """A filter that follows B episodes as they happen.

    Fed the steps of a batch, it gives the numbers that `run` gives for the batch (under the same seed, if the
    batch is handled at once).

    Args:
        backend: Which filter.
        model: Of what.
        num_episodes: How many episodes B are followed side by side.
        prior: Over contexts, `[C]` or `[B, C]`; the model's if left out.
        seed: For backends that draw random numbers.

    Attributes:
        belief: The backend's belief about the state, with first axes `[C, B]`.
        log_likelihood: Of everything seen so far, float64 `[B, C]`.
        time: Number of steps so far.

    Example:
        >>> from cpomdp_ppl.inference import ParticleFilter
        >>> from cpomdp_ppl.models import LightDark
        >>> online = ParticleFilter().online(LightDark(), seed=0)
        >>> online.observe("right")
        >>> online.observe("observe", {"z": 0.3})
        >>> online.posterior.shape
        torch.Size([1, 2])
    """

    def __init__(
        self,
        backend: Backend,
        model: CPOMDP,
        num_episodes: int = 1,
        *,
        prior: Sequence[float] | Tensor | None = None,
        seed: int | None = None,
    ) -> None:
        model.require_definition()
        require_count("num_episodes", num_episodes)
        self.model = model
        self.num_episodes = num_episodes
        p = torch.as_tensor(model.prior() if prior is None else prior, device=model.device)
        C = model.num_contexts
        require(
            p.shape in ((C,), (num_episodes, C)),
            "prior",
            list(p.shape),
            f"shape [{C}] or [{num_episodes}, {C}]",
        )
        self._log_prior = p.double().log().expand(num_episodes, C)
        self.time = 0
        self._begun = not model.initial_observation
        self._total = torch.zeros(C, num_episodes, dtype=torch.float64, device=model.device)
        with inferring(model, seed):
            self._recursion = backend.recursion(model)
            self.belief = self._recursion.start(num_episodes)
            self._generator = torch.get_rng_state()

    def observe(
        self,
        action: int | str | Sequence[int] | Tensor | None,
        observations: Mapping[str, Any] | None = None,
        observed: Mapping[str, Any] | None = None,
    ) -> None:
        """Take in one step: the action taken, and what was seen after it.

        Args:
            action: For all episodes, or one for each, `[B]`; a name will do. None for an initial observation.
            observations: By site, `[B, …]` (or without the episode axis, for a single episode). Sites left
                out were not observed.
            observed: By site, bool `[B]`; left out, everything given counts as observed.

        Raises:
            ValueError: If this cannot be a step of the model.
            DegenerateWeightsError: If no context can have produced it.
        """
        if (action is None) == self._begun:
            expected = "an action" if self._begun else "None, with the initial observation, first"
            raise rejected("action", action, expected)
        seen = self._seen(action, observations or {}, observed)
        with inferring(self.model, 0):
            torch.set_rng_state(self._generator)
            # A recursion may write into the belief it is given; what was handed out must stay as it was.
            belief = map_belief(torch.clone, self.belief)
            act = self._recursion.look if action is None else self._recursion.step
            belief, increment = act(belief, seen)
            self._total = checked(self.model, self._total, increment, seen)
            self.belief = belief
            self._generator = torch.get_rng_state()
        self._begun = True
        self.time += action is not None

    @property
    def log_likelihood(self) -> Tensor:
        """`log p(o_{1:t} | a_{0:t-1}, c)`, float64 `[B, C]`."""
        return self._total.T

    @property
    def posterior(self) -> Tensor:
        """`P(c | o_{1:t})`, float64 `[B, C]`."""
        return (self._log_prior + self.log_likelihood).softmax(-1)

    @property
    def state_mean(self) -> Any:
        """Filtered mean of the state under every context, leaves `[B, C, …]`."""
        return self._moments(0)

    @property
    def state_variance(self) -> Any:
        """Filtered variance of the state under every context, leaves `[B, C, …]`."""
        return self._moments(1)

    def _moments(self, which: int) -> Any:
        with inferring(self.model, 0):
            moments = self._recursion.moments(self.belief)[which]
        return map_belief(lambda leaf: leaf.movedim(1, 0), moments)

    def expected_reward(self, action: int | str | Sequence[int] | Tensor) -> Tensor:
        """`E[r_c(s_t, a)]` under the belief, `[B, C]`."""
        with inferring(self.model, 0):
            return self._recursion.expected_reward(self.belief, self._actions(action)).T

    def _actions(self, action: Any) -> Tensor:
        names = self.model.action_names
        if isinstance(action, str):
            require(action in names, "action", action, f"one of {list(names)}")
            action = names.index(action)
        a = torch.as_tensor(action, device=self.model.device)
        whole = not a.is_floating_point() and a.dtype != torch.bool and a.shape in ((), (self.num_episodes,))
        require(whole, "action", action, f"an index, a name, or indices [{self.num_episodes}]")
        low, high = (int(extreme) for extreme in a.aminmax())
        require(low >= 0 and high < len(names), "action", action, f"0 to {len(names) - 1}")
        return a.long().expand(self.num_episodes)

    def _seen(self, action: Any, observations: Mapping[str, Any], observed: Mapping[str, Any] | None) -> Seen:
        B, sites = self.num_episodes, self._recursion.signature.observations
        unknown = sorted(set(observations) - set(sites))
        require(not unknown, "observations", unknown, f"sites out of {sorted(sites)}")
        values, flags = {}, {}
        for name, spec in sites.items():
            value = torch.zeros((B, *spec.shape), dtype=spec.dtype, device=self.model.device)
            flag = torch.zeros((B, *spec.plates), dtype=torch.bool, device=self.model.device)
            if name in observations:
                given = torch.as_tensor(observations[name], device=self.model.device).to(spec.dtype)
                fits = given.numel() == value.numel()
                require(fits, f"observations['{name}']", list(given.shape), f"shape {list(value.shape)}")
                value = given.reshape(value.shape)
                flag = torch.ones_like(flag)
                if observed is not None:
                    flag = (
                        torch.as_tensor(observed.get(name, False), device=flag.device).bool().expand_as(flag)
                    )
                event = value.dim() - flag.dim()
                counted = flag.reshape(flag.shape + (1,) * event)
                finite = not value.is_floating_point() or bool((torch.isfinite(value) | ~counted).all())
                require(finite, f"observations['{name}']", value.tolist(), "finite values where observed")
                value = torch.where(counted, value, value.new_zeros(()))
            values[name], flags[name] = value, flag
        (rows,) = rows_observed({name: flag[None] for name, flag in flags.items()})
        time = 0 if action is None else self.time + 1
        return Seen(time, None if action is None else self._actions(action), values, flags, rows)
