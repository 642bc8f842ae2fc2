"""A policy at work: one episode at a time, fed by the world instead of the simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpomdp_ppl.actions import require_actions
from cpomdp_ppl.errors import invalid, require_model
from cpomdp_ppl.inference.choice import backend_for
from cpomdp_ppl.policy import Greedy, History, as_policy
from cpomdp_ppl.rng import RandomStream, fresh_seed
from cpomdp_ppl.rollout import action_site

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.inference.online import OnlineFilter
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.policy import Decision, Policy


class Agent:
    """A policy that lives through one episode, with a filter that keeps track of the context.

    Args:
        model: What the agent believes of the world.
        policy: The policy that decides.
        likelihood: The filter: a backend or its name; left out, the `default_backend` for the model.
        prior: Prior over contexts, `[C]`, from which policy and filter start; the model's if left out.
        greedy: Whether to take the likeliest action instead of drawing one; of continuous ones, the mode of
            the policy's distribution.
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
        self._acting = Greedy(self.policy) if greedy else self.policy
        number = fresh_seed(seed)
        self.filter: OnlineFilter = backend_for(model, likelihood).online(model, prior=prior, seed=number)
        self._stream = RandomStream(number)
        with self._stream, torch.no_grad():
            self._memory = self._acting.start(self.filter.prior.to(model.prior()))
        self._history: History | None = None
        self._pending: int | NDArray[np.floating[Any]] | None = None
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

    @property
    def ended(self) -> bool:
        """Whether the episode has ended before the horizon, as the site `ended` said."""
        return bool(self.filter.ended[0])

    @property
    def over(self) -> bool:
        """Whether there is nothing left to do: the episode has ended, or the horizon is reached."""
        return self.ended or self.time >= self.model.horizon

    def act(self) -> int | NDArray[np.floating[Any]]:
        """Choose the next action.

        Returns:
            Its index; `model.action_names` says what it is called. A continuous one is an array `[D]`.

        Raises:
            RuntimeError: If the last action's observations are still to come, or the episode is over.
        """
        history = self.history
        if self._pending is not None:
            raise RuntimeError(f"call observe() with what was seen after {self._last} before acting again")
        if self.over:
            raise RuntimeError(f"the episode {self._outcome}")
        with self._stream, torch.no_grad(), self.model.running():
            decision, self._memory = self._acting.act(history, self._memory)
            action = self._chosen(decision)
        if self.model.box is None:
            self._pending = int(action)
            return self._pending
        self._pending = action.cpu().numpy().copy()
        return self._pending.copy()  # the caller's own, who may change it

    def _chosen(self, decision: Decision) -> Tensor:
        """The action that a decision comes to: an index, or real numbers `[D]`."""
        action: Tensor = action_site(decision, self.model, torch.Size((1,)), ()).sample()
        require_actions("policy", action, self.model)
        return action[0]

    @property
    def _last(self) -> str:
        """What the pending action is called."""
        if isinstance(self._pending, int):
            return f"'{self.model.action_names[self._pending]}'"
        return str(self._pending)

    @property
    def _outcome(self) -> str:
        """How the episode came to be over."""
        if self.ended:
            return f"has ended after {self.time} steps"
        return f"is over after {self.model.horizon} steps"

    def observe(
        self,
        observations: Mapping[str, Any] | None = None,
        *,
        observed: Mapping[str, Any] | None = None,
        action: Any = None,
    ) -> None:
        """Take in what was seen after the last action; sites that the program masks then are left out.

        Of a model whose episodes may end, `ended` is one of the sites, and always seen: that an episode goes
        on is evidence, too.

        Args:
            observations: By site.
            observed: By site, whether it counts; left out, everything given does, and nothing else may be
                missing. With it, sites left out were not seen: a sensor may fail.
            action: What was really done, if it was not what `act` said, or if nobody asked: an index or a
                name; `[D]`, if actions are continuous.

        Raises:
            ValueError: If this cannot be a step of the model.
            ObservationError: If a site is missing that is always seen after this action.
            RuntimeError: If no action was chosen.
        """
        if self._history is None:
            self.filter.observe(None, observations, observed, complete=observed is None)
            self._history = History((self.filter.latest,))
            return
        if self.over:
            raise invalid("observations", observations, f"nothing more: the episode {self._outcome}")
        if self._pending is None:
            if action is None:
                raise RuntimeError("call act() first, or say which action was taken")
            self.act()  # for the policy's memory, which has every step pass through it
        done: Any = self._pending if action is None else action
        self.filter.observe(done, observations, observed, complete=observed is None)
        self._history = self._history.extended(self.filter.latest)
        self._pending = None
