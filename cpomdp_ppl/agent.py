"""A policy at work: one episode at a time, fed by the world instead of the simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution

from cpomdp_ppl.errors import invalid, require, require_model
from cpomdp_ppl.inference.choice import backend_for
from cpomdp_ppl.policy import History, as_policy
from cpomdp_ppl.rng import RandomStream, fresh_seed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.inference.online import OnlineFilter
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Policy


class Agent:
    """A policy that lives through one episode, with a filter that keeps track of the context.

    Args:
        model: What the agent believes of the world.
        policy: The policy that decides.
        likelihood: The filter: a backend or its name; left out, the `default_backend` for the model.
        prior: Prior over contexts, `[C]`, from which policy and filter start; the model's if left out.
        greedy: Whether to take the likeliest action instead of drawing one.
        seed: Seed of the policy's draws and the filter's; left out, fresh entropy is taken.

    Attributes:
        filter: The online filter, for its moments and expected rewards.

    Examples:
        >>> from cpomdp_ppl import RandomPolicy
        >>> from cpomdp_ppl.models import LightDark
        >>> agent = Agent(LightDark(), RandomPolicy(3), seed=0)
        >>> for _ in range(3):
        ...     action = agent.act()
        ...     agent.observe({"z": 0.4} if action == 2 else {})
        >>> agent.posterior.shape
        torch.Size([2])
    """

    def __init__(
        self,
        model: CPOMDP,
        policy: Policy,
        *,
        likelihood: str | Backend | None = None,
        prior: Sequence[float] | Tensor | None = None,
        greedy: bool = False,
        seed: int | None = None,
    ) -> None:
        require_model(model)
        self.model = model
        self.policy = as_policy(policy)
        self.greedy = greedy
        number = fresh_seed(seed)
        self.filter: OnlineFilter = backend_for(model, likelihood).online(model, prior=prior, seed=number)
        self._stream = RandomStream(number)
        with self._stream, torch.no_grad():
            self._memory = self.policy.start(self.filter.prior.to(model.prior()))
        self._history: History | None = None
        self._pending: int | None = None
        if not model.initial_observation:
            self._history = History((self.filter.latest,))

    @property
    def time(self) -> int:
        """The time t: how many steps are over."""
        return self.filter.time

    @property
    def posterior(self) -> Tensor:
        """`P(c | h_t)`, float64 `[C]`."""
        return self.filter.posterior[0]

    @property
    def history(self) -> History:
        """Everything the agent knows."""
        if self._history is None:
            raise RuntimeError("nothing is known yet: the model asks for an initial observation first")
        return self._history

    def act(self) -> int:
        """Choose the next action, by index; `model.action_names` says what it is called.

        Raises:
            RuntimeError: If the last action's observations are still to come, or the episode is over.
        """
        history = self.history
        if self._pending is not None:
            name = self.model.action_names[self._pending]
            raise RuntimeError(f"call observe() with what was seen after '{name}' before acting again")
        if self.time >= self.model.horizon:
            raise RuntimeError(f"the episode is over after {self.model.horizon} steps")
        with self._stream, torch.no_grad(), self.model.running():
            decision, self._memory = self.policy.act(history, self._memory)
            if isinstance(decision, Categorical) and self.greedy:
                decision = decision.logits.argmax(-1)
            elif isinstance(decision, Distribution):
                decision = decision.sample()
        action = int(decision[0])
        require(0 <= action < self.model.num_actions, "policy", action, "one of the model's actions")
        self._pending = action
        return action

    def observe(
        self,
        observations: Mapping[str, Any] | None = None,
        *,
        observed: Mapping[str, Any] | None = None,
        action: int | str | None = None,
    ) -> None:
        """Take in what was seen after the last action; sites that the program masks then are left out.

        Args:
            observations: By site.
            observed: By site, whether it counts; left out, everything given does, and nothing else may be
                missing. With it, sites left out were not seen: a sensor may fail.
            action: What was really done, if it was not what `act` said, or if nobody asked.

        Raises:
            ValueError: If this cannot be a step of the model.
            ObservationError: If a site is missing that is always seen after this action.
            RuntimeError: If no action was chosen.
        """
        if self._history is None:
            self.filter.observe(None, observations, observed, complete=observed is None)
            self._history = History((self.filter.latest,))
            return
        if self.time >= self.model.horizon:
            raise invalid("observations", observations, f"no more than {self.model.horizon} steps")
        if self._pending is None:
            if action is None:
                raise RuntimeError("call act() first, or say which action was taken")
            self.act()  # for the policy's memory, which has every step pass through it
        done = self._pending if action is None else action
        self.filter.observe(done, observations, observed, complete=observed is None)
        self._history = self._history.extended(self.filter.latest)
        self._pending = None
