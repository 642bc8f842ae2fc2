"""The modelling language: a contextual POMDP written once, as a Pyro generative program."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule
from torch import Tensor

from cpomdp_ppl.actions import Box
from cpomdp_ppl.check import definition_faults, program_faults, reward_arguments
from cpomdp_ppl.errors import ModelError, UnsupportedModelError, as_integer, require_count
from cpomdp_ppl.rollout import require_chances, rollout
from cpomdp_ppl.signature import ENDED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cpomdp_ppl.episodes import Episodes
    from cpomdp_ppl.policy import Decision, History, Policy
    from cpomdp_ppl.state import State


ARGUMENTS_ON_ARRIVAL = 4
"""Number of those of `reward(state, action, context, next_state)`."""


class CPOMDP(PyroModule):
    """A family of POMDPs that share states and actions, and differ by a hidden context.

    A context is drawn once and stays for the episode. At time t the agent is in state `s_t`, picks
    `a_t` from what it has seen, earns `r_c(s_t, a_t)`, moves to `s_{t+1}` and sees `o_{t+1}`, and whether the
    episode has ended there, if it can. The agent does not see rewards.

    Subclasses set the attributes below and write four programs, or five. Programs are written as in Pyro:
    every argument broadcasts, and the engine inserts axes for contexts, episodes and particles to the left of
    whatever the program itself uses. A state is a tensor or a dict of tensors; contexts and actions are
    int64 indices, and continuous actions have an axis of their own on the right, `[…, D]`.

    Attributes:
        contexts: Names of the contexts, or their number.
        actions: Names of the actions, or their number; or a `Box` of continuous ones.
        horizon: Number of steps T of an episode, at most.
        discount: What a reward is worth a step later, γ: the return is `Σ_t γ^t r_t`.
        context_prior: Probabilities `[C]`, which may be a `PyroParam`, a parameter or a buffer; None, or not
            set, means uniform.
        states: Number of states, if there are finitely many; a state is then an index `0 … states - 1`
            (or a boolean, of two).
        initial_observation: Whether the agent sees something before its first action; `observation` is
            then also called with `action=None`.
        max_plate_nesting: Number of axes that plates inside the programs take.

    Examples:
        >>> class Coin(CPOMDP):
        ...     contexts, actions, horizon = ("fair", "loaded"), ("flip", "call fair", "call loaded"), 5
        ...     def initial(self, context):
        ...         return torch.zeros(())
        ...     def transition(self, state, action, context):
        ...         return state
        ...     def observation(self, state, action, context):
        ...         heads = torch.where(context == 0, 0.5, 0.9)
        ...         pyro.sample("heads", dist.Bernoulli(heads).mask(action == 0))
        ...     def reward(self, state, action, context):
        ...         return torch.where(action == 0, 0.0, torch.where(action == context + 1, 1.0, -1.0))
        >>> Coin().check()
    """

    contexts: Sequence[str] | int
    actions: Sequence[str] | int | Box
    horizon: int
    discount: float = 1.0
    context_prior: Sequence[float] | Tensor | None  # no default: it would hide a parameter of this name
    states: int | None = None
    initial_observation: bool = False
    max_plate_nesting: int = 0

    @abstractmethod
    def initial(self, context: Tensor) -> State:
        """Sample the first state."""

    @abstractmethod
    def transition(self, state: Any, action: Tensor, context: Tensor) -> State:
        """Sample the next state. It may be any function of the program's sample sites."""

    @abstractmethod
    def observation(self, state: Any, action: Any, context: Tensor) -> None:
        """Sample what is seen in `state` after `action`: every sample site is an observation.

        A masked-out site was not observed. A mask may depend on the action and on other sites of this
        program, but not on the hidden state or context: if whether something is seen depends on those,
        it is itself an observation, so make it a site (`detected`) and its value the mask.
        """

    if TYPE_CHECKING:
        reward: Callable[..., Tensor]  # of three arguments, or of four
    else:

        @abstractmethod
        def reward(self, state: Any, action: Tensor, context: Tensor) -> Tensor:
            """The reward of taking `action` in `state`: a function, without sample sites.

            A model that pays for where one lands writes `reward(self, state, action, context, next_state)`;
            arguments that have a default keep it.
            """

    def ends(self, state: Any, action: Tensor, context: Tensor) -> Tensor:
        """Whether the episode ends in `state` after `action`: truth values, or the probability of it.

        Models whose episodes may end before the horizon write this program, which has no sample sites. The
        agent sees whether they do: that is one more observation site, `ended`, so that to go on is evidence,
        too. What `observation` shows of the last state is still seen. Programs go on running for episodes
        that are over, beside the others: what they make of them must be proper, and counts for nothing.
        """
        raise NotImplementedError

    def percept(self, state: Any, action: Any, context: Tensor) -> None:
        """All that the agent gets to know of `state` after `action`: `observation`, and the site `ended`."""
        self.observation(state, action, context)
        if self.can_end:
            chance = torch.zeros(()) if action is None else self.ends(state, action, context)
            chance = chance if chance.is_floating_point() else chance.to(torch.get_default_dtype())
            try:
                end = dist.Bernoulli(chance)
                pyro.sample(ENDED, end.mask(False) if action is None else end)
            except (RuntimeError, ValueError):  # of torch, which cannot say whose chance it is
                require_chances(self, chance)
                raise

    @property
    def can_end(self) -> bool:
        """Whether episodes may end before the horizon."""
        return getattr(self.ends, "__func__", None) is not CPOMDP.ends

    @property
    def pays_on_arrival(self) -> bool:
        """Whether rewards depend on the next state, too."""
        return len(reward_arguments(self)) == ARGUMENTS_ON_ARRIVAL

    @property
    def num_contexts(self) -> int:
        """Number of contexts C."""
        return _number(self.contexts)

    @property
    def box(self) -> Box | None:
        """The box of continuous actions; None if they are finitely many."""
        return self.actions if isinstance(self.actions, Box) else None

    @property
    def num_actions(self) -> int:
        """Number of actions.

        Raises:
            UnsupportedModelError: If they are continuous.
        """
        return _number(self._finite_actions)

    @property
    def context_names(self) -> tuple[str, ...]:
        """Name of every context."""
        return _names(self.contexts)

    @property
    def action_names(self) -> tuple[str, ...]:
        """Name of every action.

        Raises:
            UnsupportedModelError: If they are continuous; `box.names` are those of the axes.
        """
        return _names(self._finite_actions)

    @property
    def _finite_actions(self) -> Sequence[str] | int:
        if isinstance(self.actions, Box):
            raise UnsupportedModelError(
                f"{type(self).__name__} has continuous actions, and no list of them: give `model.actions`, "
                "the Box, where actions are asked for; `model.box.names` are the names of its axes"
            )
        return self.actions

    @property
    def device(self) -> torch.device:
        """Where the model's constants live."""
        for tensor in chain(self.parameters(), self.buffers()):
            return tensor.device
        return torch.get_default_device()

    def prior(self) -> Tensor:
        """Prior probabilities of the contexts, `[C]`."""
        prior = getattr(self, "context_prior", None)
        if prior is None:
            return torch.full((self.num_contexts,), 1.0 / self.num_contexts, device=self.device)
        return torch.as_tensor(prior, dtype=torch.get_default_dtype(), device=self.device)

    def context_known_return(self) -> Tensor | None:
        """The best expected return in every context for an agent that knows it, `[C]`, if there is a formula.

        The return is discounted, if the model's is.

        Models override this to have regret without error. Without it, regret is against a policy that is told
        the context (see `cpomdp_ppl.evaluation.evaluate`), and bounded where context and state known can be
        solved for (see `cpomdp_ppl.bounds.informed_return`).
        """
        return None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, programs may be called one by one, and see learned values as in a call of the model.

        A `PyroParam` then has the value of Pyro's param store, if that knows it, and is written to the
        store otherwise; use this inside `isolated` to leave the caller's store as it was.
        """
        with self._pyro_context:
            yield

    def forward(
        self, policy: Policy | Callable[[History], Decision], num_episodes: int | None = None
    ) -> Episodes:
        """An episode, from its context to the horizon, as one Pyro program.

        Sites are named after their time: `context`, `x_0`, `a_0`, `z_1`, `x_1`, … for a model whose
        programs sample `x` and `z`. Works under `trace`, `condition`, `do`, `replay`, `Predictive` and `SVI`
        with `Trace_ELBO`, and can be rendered. Handlers that add axes on the left (parallel enumeration,
        vectorized particles) do not work: the episodes returned have no room for them.
        What the policy itself samples is hidden from all of them; its params are not.
        To merely draw episodes, `simulate` is faster and takes a seed.

        Args:
            policy: The policy that acts.
            num_episodes: None for a single episode; otherwise an `episodes` plate of this size.

        Returns:
            The episodes drawn (one, if `num_episodes` is None).

        Examples:
            >>> import pyro.poutine as poutine
            >>> from cpomdp_ppl import RandomPolicy
            >>> from cpomdp_ppl.models import LightDark
            >>> model = LightDark(horizon=2)
            >>> dark_right = pyro.condition(model, {"context": torch.tensor(1)})
            >>> trace = poutine.trace(dark_right).get_trace(RandomPolicy(model.num_actions))
            >>> trace.nodes["x_0"]["value"].shape
            torch.Size([])
        """
        self.require_definition()
        prior = self.prior()
        if num_episodes is None:
            context = pyro.sample("context", dist.Categorical(prior))
            return rollout(self, policy, context.reshape(()), prior)
        num_episodes = require_count("num_episodes", num_episodes)
        with pyro.plate("episodes", num_episodes, dim=-1 - self.max_plate_nesting):
            context = pyro.sample("context", dist.Categorical(prior))
            plated = (num_episodes, *[1] * self.max_plate_nesting)
            return rollout(self, policy, context.expand(plated).reshape(num_episodes), prior)

    def require_definition(self) -> None:
        """Raise a `ModelError` unless attributes and methods are all there and make sense."""
        faults = definition_faults(self)
        if faults:
            raise ModelError(type(self).__name__, faults)

    def check(self) -> None:
        """Find out what is wrong with the programs before anything long runs.

        Runs every program on small batches, for every context and action, with validation on.

        Raises:
            ModelError: With one sentence for every fault found.
        """
        self.require_definition()
        faults = program_faults(self)
        if faults:
            raise ModelError(type(self).__name__, faults)


def _number(names: Sequence[str] | int) -> int:
    number = as_integer(names)
    return len(names) if number is None else number  # type: ignore[arg-type]


def _names(names: Sequence[str] | int) -> tuple[str, ...]:
    number = as_integer(names)
    return tuple(names) if number is None else tuple(map(str, range(number)))  # type: ignore[arg-type]
