"""The same recursions, fed one step at a time: what a deployed agent or a planner needs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyro.poutine as poutine
import torch
from torch import Tensor

from cpomdp_ppl.errors import ObservationError, invalid, require, require_count, require_model
from cpomdp_ppl.generative import Generative
from cpomdp_ppl.inference.backend import inference_scope, require_real, require_real_moments
from cpomdp_ppl.inference.belief import map_belief
from cpomdp_ppl.inference.filtering import log_normalised
from cpomdp_ppl.inference.native_recursion import Keys, NativeSMC
from cpomdp_ppl.inference.persistence import Persistent
from cpomdp_ppl.inference.step_arguments import StepArguments
from cpomdp_ppl.policy import Percept
from cpomdp_ppl.prior import as_prior
from cpomdp_ppl.rng import fresh_seed
from cpomdp_ppl.rollout import blind
from cpomdp_ppl.signature import ENDED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.inference.observed import Observed
    from cpomdp_ppl.model import CPOMDP


class OnlineFilter:
    """A filter that follows B episodes as they happen.

    Fed the steps of a batch, it gives the numbers that `run` gives for the batch (under the same seed, if the
    batch is handled at once, and by one engine). An episode that has lost all particles is filtered again
    from its start with more of them, of which as many are drawn as there were.

    Args:
        backend: The filter.
        model: The model that is filtered.
        num_episodes: How many episodes B are followed side by side.
        prior: Prior over contexts, `[C]` or `[B, C]`; the model's if left out.
        seed: Seed of the random numbers, for backends that draw any.

    Attributes:
        belief: The backend's belief about the state, with first axes `[C, B]`.
        log_likelihood: Log-likelihood of everything seen so far, float64 `[B, C]`.
        prior: Prior over contexts, float64 `[B, C]`.
        latest: The percept of the last step; before any, one in which nothing was observed.
        ended: Which episodes are over, bool `[B]`: whatever is done later, what is known of them stays.
        time: Number of steps so far.

    Examples:
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
        require_model(model)
        num_episodes = require_count("num_episodes", num_episodes)
        self.model = model
        self.num_episodes = num_episodes
        C = model.num_contexts
        p = as_prior(model.prior() if prior is None else prior, C, num_episodes).to(model.device)
        self.prior = p.expand(num_episodes, C)
        self.time = 0
        self._begun = not model.initial_observation
        number = fresh_seed(seed)
        with inference_scope(model, number):
            self._recursion = backend.recursion(model)
            self._keys = None
            if isinstance(self._recursion, NativeSMC):
                self._keys = self._recursion.keys = Keys(number)
            self._filter = Persistent(backend, self._recursion, self.prior)
            self._track = self._filter.start(num_episodes)
            # Where random numbers go on: a step that fails, and a copy that is made, must not move it.
            self._randomness: Any = torch.get_rng_state() if self._keys is None else self._keys.position
        self._arguments = StepArguments(model, self._recursion.signature, num_episodes)
        self.latest = blind(self._recursion.signature, num_episodes, model.device)
        self.ended = torch.zeros(num_episodes, dtype=torch.bool, device=model.device)

    def observe(
        self,
        action: int | str | Sequence[int | str] | Tensor | None,
        observations: Mapping[str, Any] | None = None,
        observed: Mapping[str, Any] | None = None,
        *,
        complete: bool = False,
    ) -> None:
        """Take in one step: the action taken, and what was seen after it.

        Args:
            action: For all episodes, or one for each, `[B]`; names will do. Continuous ones are `[D]` or
                `[B, D]`. None for an initial observation.
            observations: By site, `[B, …]` (or without the episode axis, for a single episode). Sites left
                out were not observed. Of models whose episodes may end, `ended` is one, and says as much
                where an episode goes on: it is not to be left out, unless `observed` says that nobody knows.
            observed: By site, bool `[B]` (`[B, …]` for sites in the program's own plates; sites left out
                were not observed). Without it, everything given counts as observed.
            complete: Whether to refuse a step in which a site was not observed that the program shows.

        Raises:
            ValueError: If this cannot be a step of the model.
            ObservationError: If it is not complete, but should be, or does not say whether that was the end.
            DegenerateWeightsError: If no context can have produced it, however many particles.
        """
        if (action is None) == self._begun:
            expected = "an action" if self._begun else "None, with the initial observation, first"
            raise invalid("action", action, expected)
        time = 0 if action is None else self.time + 1
        seen = self._arguments.read(time, action, {} if observations is None else observations, observed)
        if bool(self.ended.any()):
            seen = self._of_the_living(seen)
        if complete:
            self._require_complete(seen)
        if self.model.can_end and action is not None and (observed is None or ENDED not in observed):
            self._require_told_of_the_end(seen)
        if self._keys is not None:  # it will enter a scope itself, should it have to
            self._keys.position = self._randomness
            self._take_in(seen)
            self._randomness = self._keys.position
        else:
            with inference_scope(self.model, 0):
                torch.set_rng_state(self._randomness)
                self._take_in(seen)
                self._randomness = torch.get_rng_state()
        self.latest = Percept(seen.action, seen.observations, seen.observed)
        if self.model.can_end:
            self.ended = self.ended | self.latest.ended
        self._begun = True
        self.time += action is not None

    def _take_in(self, seen: Observed) -> None:
        take_in = self._filter.condition if seen.action is None else self._filter.step
        self._track, _ = take_in(self._track, seen)

    def _of_the_living(self, seen: Observed) -> Observed:
        """A step of episodes of which some are over; raises if anything was observed in those."""
        for site, flags in seen.observed.items():
            late = flags.reshape(len(flags), -1).any(1) & self.ended
            where = f"of episode {int(late.nonzero()[0])}" if bool(late.any()) else ""
            require(not where, f"observations['{site}']", f"one {where}", "none after the end of an episode")
        return replace(seen, alive=~self.ended)

    @property
    def belief(self) -> Any:
        """The backend's belief about the state, with first axes `[C, B]`."""
        return self._track.belief

    @property
    def log_likelihood(self) -> Tensor:
        """`log p(o_{1:t} | a_{0:t-1}, c)`, float64 `[B, C]`."""
        return self._track.log_likelihood.T

    @property
    def posterior(self) -> Tensor:
        """`P(c | o_{1:t})`, float64 `[B, C]`.

        Raises:
            DegenerateWeightsError: If the prior excludes every context that can have produced an episode.
        """
        joint = self.prior.log() + self.log_likelihood
        return log_normalised(joint[:, None], self.time).squeeze(1).exp()

    @property
    def state_mean(self) -> Any:
        """Filtered mean of the state under every context, leaves `[B, C, …]`."""
        return self._moments(0)

    @property
    def state_variance(self) -> Any:
        """Filtered variance of the state under every context, leaves `[B, C, …]`."""
        return self._moments(1)

    def _moments(self, which: int) -> Any:
        with inference_scope(self.model, 0):
            moments = self._recursion.moments(self.belief)
        require_real_moments(*moments, 2, self._place)
        return map_belief(lambda leaf: leaf.movedim(1, 0), moments[which])

    def expected_reward(self, action: int | str | Sequence[int | str] | Tensor) -> Tensor:
        """`E[r_c(s_t, a)]` under the belief, `[B, C]`; zero for episodes that are over.

        Raises:
            DensityError: If a program left the reals.
        """
        with inference_scope(self.model, 0):
            reward = self._recursion.expected_reward(self.belief, self._arguments.actions(action))
        require_real("reward: the expected reward", reward, 2, self._place)
        return torch.where(self.ended[:, None], 0.0, reward.T) if self.model.can_end else reward.T

    def _require_complete(self, seen: Observed) -> None:
        """Raise if the program shows a site that was not observed.

        Masks depend on the action and on sites that are seen, and on no state or context: any will do. The
        first that is missing is named, as masks of later ones may depend on it.
        """
        missing = [site for site, flags in seen.observed.items() if not bool(flags.all())]
        if not missing:
            return
        given = {site: value for site, value in seen.observations.items() if site not in missing}
        shown = self._shown(seen.action, given)
        for site in missing:
            lacking = (shown[site] & ~seen.observed[site]).reshape(self.num_episodes, -1).any(1) & ~self.ended
            if bool(lacking.any()):
                b = int(lacking.nonzero()[0])
                when = "before the first action"
                if seen.action is not None:
                    when = f"after {self._name(seen.action[b])}"
                raise ObservationError(
                    f"observations: expected site '{site}', which is always seen {when}, got "
                    f"{list(given) or 'nothing'}; if it was not seen all the same, say "
                    f"observed={ {**dict.fromkeys(given, True), site: False} }"
                )

    def _require_told_of_the_end(self, seen: Observed) -> None:
        """Raise if nothing says whether an episode has ended: to leave out that it goes on would be wrong."""
        told = seen.observed[ENDED].reshape(self.num_episodes, -1).any(1) | self.ended
        if not bool(told.all()):
            given = [site for site, flags in seen.observed.items() if bool(flags.any())]
            raise ObservationError(
                f"observations: expected site '{ENDED}', as to go on is evidence, too, "
                f"got {given or 'nothing'}; "
                f"if nobody knows, say observed={ {**dict.fromkeys(given, True), ENDED: False} }"
            )

    def _shown(self, action: Tensor | None, given: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """What the program shows after an action, if it shows what is given; by site, bool `[B, *plates]`."""
        known = None
        finite = self.model.box is None
        if isinstance(self._recursion, NativeSMC) and self.num_episodes == 1 and finite:
            known = self._recursion.known_masks()
        number = None if action is None or not finite else int(action[0])
        if known is not None and number in known:
            return known[number]
        contexts = torch.zeros(self.num_episodes, dtype=torch.long, device=self.model.device)
        with inference_scope(self.model, 0), poutine.condition(data=given):
            programs = Generative(self.model)
            shown = programs.observe(programs.initial(contexts), contexts, action).observed
        if known is not None:
            known[number] = shown
        return shown

    def _name(self, action: Tensor) -> str:
        """An action of one episode, for messages."""
        return str(action.tolist()) if action.dim() else f"'{self.model.action_names[int(action)]}'"

    def _place(self, c: int, b: int) -> str:
        return f"time {self.time} of episode {b} in context '{self.model.context_names[c]}'"
