"""The same recursions, fed one step at a time: what a deployed agent or a planner needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyro.poutine as poutine
import torch
from torch import Tensor

from cpomdp_ppl.arrays import (
    as_indices,
    as_tensor,
    as_type,
    filled,
    on_the_right,
    require_finite,
    without_unit_axes,
)
from cpomdp_ppl.errors import ObservationError, invalid, require, require_count, require_model
from cpomdp_ppl.generative import Generative
from cpomdp_ppl.inference.backend import (
    inference_scope,
    require_real,
    require_real_moments,
)
from cpomdp_ppl.inference.belief import map_belief
from cpomdp_ppl.inference.filtering import log_normalised
from cpomdp_ppl.inference.observed import Observed
from cpomdp_ppl.inference.persistence import Persistent
from cpomdp_ppl.policy import Percept
from cpomdp_ppl.prior import as_prior
from cpomdp_ppl.rollout import blind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.model import CPOMDP
    from cpomdp_ppl.signature import ObservationSite


class OnlineFilter:
    """A filter that follows B episodes as they happen.

    Fed the steps of a batch, it gives the numbers that `run` gives for the batch (under the same seed, if the
    batch is handled at once). An episode that has lost all particles is filtered again from its start with
    more of them, of which as many are drawn as there were.

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
        with inference_scope(model, seed):
            self._recursion = backend.recursion(model)
            self._filter = Persistent(backend, self._recursion, self.prior)
            self._track = self._filter.start(num_episodes)
            self._generator = torch.get_rng_state()
        self.latest = blind(self._recursion.signature, num_episodes, model.device)

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
            action: For all episodes, or one for each, `[B]`; names will do. None for an initial observation.
            observations: By site, `[B, …]` (or without the episode axis, for a single episode). Sites left
                out were not observed.
            observed: By site, bool `[B]` (`[B, …]` for sites in the program's own plates; sites left out
                were not observed). Without it, everything given counts as observed.
            complete: Whether to refuse a step in which a site was not observed that the program shows.

        Raises:
            ValueError: If this cannot be a step of the model.
            ObservationError: If it is not complete, but should be.
            DegenerateWeightsError: If no context can have produced it, however many particles.
        """
        if (action is None) == self._begun:
            expected = "an action" if self._begun else "None, with the initial observation, first"
            raise invalid("action", action, expected)
        seen = self._seen(action, {} if observations is None else observations, observed)
        if complete:
            self._require_complete(seen)
        with inference_scope(self.model, 0):
            torch.set_rng_state(self._generator)
            take_in = self._filter.condition if action is None else self._filter.step
            self._track, _ = take_in(self._track, seen)
            self._generator = torch.get_rng_state()
        self.latest = Percept(seen.action, seen.observations, seen.observed)
        self._begun = True
        self.time += action is not None

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
        """`E[r_c(s_t, a)]` under the belief, `[B, C]`.

        Raises:
            DensityError: If a program left the reals.
        """
        with inference_scope(self.model, 0):
            reward = self._recursion.expected_reward(self.belief, self._actions(action))
        require_real("reward: the expected reward", reward, 2, self._place)
        return reward.T

    def _require_complete(self, seen: Observed) -> None:
        """Raise if the program shows a site that was not observed.

        Masks depend on the action and on sites that are seen, and on no state or context: any will do. The
        first that is missing is named, as masks of later ones may depend on it.
        """
        missing = [site for site, flags in seen.observed.items() if not bool(flags.all())]
        if not missing:
            return
        given = {site: value for site, value in seen.observations.items() if site not in missing}
        contexts = torch.zeros(self.num_episodes, dtype=torch.long, device=self.model.device)
        with inference_scope(self.model, 0), poutine.condition(data=given):
            programs = Generative(self.model)
            shown = programs.observe(programs.initial(contexts), contexts, seen.action).observed
        for site in missing:
            lacking = (shown[site] & ~seen.observed[site]).reshape(self.num_episodes, -1).any(1)
            if bool(lacking.any()):
                b = int(lacking.nonzero()[0])
                when = "before the first action"
                if seen.action is not None:
                    when = f"after '{self.model.action_names[int(seen.action[b])]}'"
                raise ObservationError(
                    f"observations: expected site '{site}', which is always seen {when}, got "
                    f"{list(given) or 'nothing'}; if it was not seen all the same, say "
                    f"observed={ {**dict.fromkeys(given, True), site: False} }"
                )

    def _place(self, c: int, b: int) -> str:
        return f"time {self.time} of episode {b} in context '{self.model.context_names[c]}'"

    def _actions(self, action: Any) -> Tensor:
        B, names = self.num_episodes, self.model.action_names
        a = as_indices("action", action, names).to(self.model.device)
        require(a.shape in ((), (B,)), "action", action, f"an index, a name, or either for each: [{B}]")
        low, high = (int(extreme) for extreme in a.aminmax())
        require(low >= 0 and high < len(names), "action", action, f"0 to {len(names) - 1}")
        return a.expand(B)

    def _seen(self, action: Any, observations: Any, observed: Any) -> Observed:
        sites = self._recursion.signature.observations
        _require_sites("observations", observations, sites)
        if observed is not None:
            _require_sites("observed", observed, sites)
        values, flags = {}, {}
        for name, spec in sites.items():
            given = name in observations if observed is None else observed.get(name, False)
            flag = self._flags(name, spec, given)
            if name in observations:
                value = self._values(name, spec, observations[name], flag)
            else:
                require(not bool(flag.any()), f"observed['{name}']", True, "False: it is not in observations")
                value = torch.zeros(self.num_episodes, *spec.shape, dtype=spec.dtype, device=flag.device)
            values[name], flags[name] = value, flag
        time = 0 if action is None else self.time + 1
        actions = None if action is None else self._actions(action)
        return Observed.at(time, actions, values, flags)

    def _flags(self, name: str, spec: ObservationSite, given: Any) -> Tensor:
        """Which values at a site count, bool `[B, *plates]`."""
        shape = (self.num_episodes, *spec.plates)
        what = f"observed['{name}']"
        flags = as_tensor(what, given).to(self.model.device)
        require(flags.dtype == torch.bool, what, given, "booleans")
        if flags.dim() == 0:
            return flags.expand(shape)
        if self.num_episodes == 1 and flags.shape == spec.plates:
            flags = flags[None]
        require(flags.shape in (shape, shape[:1]), what, list(flags.shape), f"shape {list(shape)}")
        return on_the_right(flags, flags.new_empty(shape)).expand(shape)

    def _values(self, name: str, spec: ObservationSite, given: Any, flags: Tensor) -> Tensor:
        """What was seen at a site, `[B, …]`, zero where that does not count."""
        B, what = self.num_episodes, f"observations['{name}']"
        value = as_tensor(what, given).to(self.model.device)
        axes = value.shape if B == 1 else value.shape[1:]  # a single episode may lack its axis
        fits = without_unit_axes(axes) == without_unit_axes(spec.shape) and (
            B == 1 or value.shape[:1] == (B,)
        )
        require(fits, what, list(value.shape), f"shape {[B, *spec.shape]}")
        value = value.reshape(B, *spec.shape)
        require_finite(what, value, flags)
        return as_type(what, filled(value, flags), spec.dtype, flags)


def _require_sites(argument: str, given: Any, sites: Mapping[str, ObservationSite]) -> None:
    require(isinstance(given, Mapping), argument, given, f"a mapping from sites out of {sorted(sites)}")
    unknown = sorted(map(str, set(given) - set(sites)))
    require(not unknown, argument, unknown, f"sites out of {sorted(sites)}")
