"""Whether a fit came to anything: its policy against what takes no learning, on the same noise."""

from __future__ import annotations

import copy
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cpomdp_ppl.actions import probe_names, probes
from cpomdp_ppl.arrays import pieces
from cpomdp_ppl.episodes import Episodes
from cpomdp_ppl.errors import (
    DegenerateWeightsError,
    DensityError,
    ModelError,
    UnsupportedModelError,
    require,
)
from cpomdp_ppl.evaluation import Mean, TimedPolicy
from cpomdp_ppl.generative import Generative, Tally
from cpomdp_ppl.inference.backend import inference_scope
from cpomdp_ppl.inference.persistence import filtered
from cpomdp_ppl.policy import Policy
from cpomdp_ppl.prior import stratified, weighted_strata
from cpomdp_ppl.rng import seed_for
from cpomdp_ppl.rollout import simulate
from solvers.cids.batch import PRIOR_SHARE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.policy import History

EPISODES = 1000
"""How many episodes each of them plays."""
FEWEST_EPISODES = 4000
"""A fit that has played fewer is a trial run, and is not judged."""
AT_ONCE = 250
"""How many episodes are played side by side."""
ERRORS = 2.0
"""How many standard errors a difference must have to count."""
ROUNDING = 1e-6
"""A difference that is no larger than this, relative to what is compared, is none."""
PLANNED_EPISODES = 256
"""In how many episodes fixed plans are compared."""

LEARNED, BEFORE, RULE = "the policy", "the policy before training", "the rule that it was started from"
SEED = 0x7E57
"""Tells random numbers from those of the fit."""
FAILURES = (DegenerateWeightsError, DensityError, ModelError, UnsupportedModelError)
"""What may happen where a policy goes that was not learned: programs and filters need not be made for it."""


class NotSolvedWarning(UserWarning):
    """Something that takes no learning does as well as the policy that was learned."""


@dataclass(frozen=True)
class Worth:
    """What a policy is worth: the return, and τ for each nat that it finds out about the context.

    Attributes:
        mean: The average.
        standard_error: Its standard error.
        behind: By how much the learned policy is ahead, on the same episodes.
        behind_error: The standard error of that.
        at_most: Whether these are bounds: what was found out counts as all that there is, because that
            already was too little, or because the filter failed.

    Examples:
        >>> Worth(1.0, 0.2, behind=0.3, behind_error=0.1).beaten, Worth(1.0, 0.2, -0.1, 0.1).ahead
        (True, False)
    """

    mean: float
    standard_error: float
    behind: float = 0.0
    behind_error: float = 0.0
    at_most: bool = False

    @property
    def beaten(self) -> bool:
        """Whether the learned policy is ahead beyond doubt."""
        return self.behind > self._doubt

    @property
    def ahead(self) -> bool:
        """Whether it is ahead of the learned policy beyond doubt."""
        return -self.behind > self._doubt and not self.at_most

    @property
    def _doubt(self) -> float:
        return ERRORS * self.behind_error + ROUNDING * (1 + abs(self.mean))

    def __str__(self) -> str:
        return f"at most {number(self.mean)}" if self.at_most else number(self.mean)


@dataclass(frozen=True)
class Verdict:
    """Whether the policy of a fit beats what takes no learning, and by how much.

    Attributes:
        solved: Whether it beats all of them beyond doubt.
        sentence: The same in words.
        temperature: τ, by which information is weighed here: that of the end of the fit.
        num_episodes: How many episodes each has played, all with the same contexts, first states and noise.
        worth: What each is worth, by name; the learned policy comes first.

    Examples:
        >>> from cpomdp_ppl.models import LineGrid
        >>> from solvers import cids
        >>> solution = cids.fit(LineGrid())  # doctest: +SKIP
        >>> solution.verdict.solved, list(solution.verdict.worth)[:2]  # doctest: +SKIP
        (True, ['the policy', 'the policy before training'])
    """

    solved: bool
    sentence: str
    temperature: float
    num_episodes: int
    worth: Mapping[str, Worth]

    def __str__(self) -> str:
        return self.sentence

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and words, to be written as JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(content: Any) -> Verdict:
        """Read what `as_dict` gave.

        Raises:
            ValueError: If it is something else.
        """
        kinds = {"solved": bool, "sentence": str, "temperature": float, "num_episodes": int, "worth": dict}
        names = ("mean", "standard_error", "behind", "behind_error")
        numbers = {**dict.fromkeys(names, float), "at_most": bool}
        found = _checked("verdict", content, kinds)
        worth = {str(name): Worth(**_checked("worth", w, numbers)) for name, w in found["worth"].items()}
        return Verdict(**{**found, "worth": worth})


def _checked(argument: str, content: Any, kinds: Mapping[str, type]) -> dict[str, Any]:
    """The entries of a dict, all of which must be there and of their types."""
    proper = isinstance(content, dict) and content.keys() == kinds.keys()
    require(proper, argument, content, f"a dict with {', '.join(kinds)}")
    for name, kind in kinds.items():
        require(type(content[name]) is kind, f"{argument} {name}", content[name], f"a {kind.__name__}")
    return dict(content)


def number(value: float) -> str:
    """A number for a sentence.

    Examples:
        >>> number(11.6213), number(-1234.5), number(0.00123)
        ('11.62', '-1,234.50', '0.0012')
    """
    return f"{value:,.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.2g}"


@dataclass(frozen=True)
class FixedPlan:
    """A policy that does what it had planned beforehand, whatever it sees.

    Attributes:
        actions: What it does at each time, `[T]` or `[T, D]`.
    """

    actions: Tensor

    @staticmethod
    def always(model: CPOMDP, action: int | Tensor) -> FixedPlan:
        """The same action all the time."""
        action = torch.as_tensor(action, device=model.device)
        return FixedPlan(action.expand(model.horizon, *action.shape))

    def start(self, prior: Tensor) -> None:
        """It remembers nothing."""

    def act(self, history: History, memory: None) -> tuple[Tensor, None]:
        """The action of this time."""
        action = self.actions[history.time]
        return action.expand(history.num_episodes, *action.shape), None


@dataclass(frozen=True, eq=False)
class Trial:
    """Episodes that all play, with the same contexts, first states and noise of the world.

    Attributes:
        model: The CPOMDP.
        backend: What computes the context posteriors.
        prior: Prior over contexts, float64 `[C]`.
        temperature: τ, what a nat is worth.
        seed: Seed of all random numbers.
        num_episodes: How many episodes each plays.
    """

    model: CPOMDP
    backend: Backend
    prior: Tensor
    temperature: float
    seed: int
    num_episodes: int = EPISODES

    @cached_property
    def strata(self) -> tuple[Tensor, Tensor]:
        """The true contexts, int64 `[B]`, and how much an episode counts, float64 `[B]`."""
        return weighted_strata(self.prior, self.num_episodes, self.seed)

    @cached_property
    def surprise(self) -> Tensor:
        """`log 1 / P(c)` of the true contexts, in nats, float64 `[B]`: all that can be found out."""
        return -self.prior.log()[self.strata[0]]

    def play(self, policy: Policy) -> TrialEpisodes:
        """Play all episodes.

        Raises:
            DegenerateWeightsError: If a policy with a filter in it loses an episode. For this and other
                errors see `FAILURES`.
        """
        contexts, parts = self.strata[0], []
        for k, rows in enumerate(pieces(len(contexts), AT_ONCE)):
            acting = TimedPolicy(policy, seed_for(self.seed, 1, k))  # with random numbers of its own
            seed, c = seed_for(self.seed, 0, k), contexts[rows]
            parts.append(simulate(self.model, acting, len(c), contexts=c, prior=self.prior, seed=seed))
        return TrialEpisodes(self, Episodes.concatenate(parts))

    def mean(self, values: Tensor) -> Mean:
        """The average of `[B]`, with contexts weighted by the prior."""
        contexts, weights = self.strata
        all_there = int((self.prior > 0).sum()) <= self.num_episodes  # or contexts were drawn
        return Mean.of(values, contexts, weights) if all_there else Mean.of(values)


@dataclass(frozen=True, eq=False)
class TrialEpisodes:
    """Episodes of a trial, as one policy has played them."""

    trial: Trial
    episodes: Episodes

    @property
    def returns(self) -> Tensor:
        """The returns, float64 `[B]`."""
        assert self.episodes.returns is not None
        return self.episodes.returns.double()

    @property
    def most(self) -> Tensor:
        """What each episode is worth at most, float64 `[B]`: as if all had been found out."""
        return self.returns + self.trial.temperature * self.trial.surprise

    @cached_property
    def worth(self) -> Tensor:
        """What each episode is worth: its return and τ (log Q(c|y) − log P(c)), float64 `[B]`.

        Q is the filter's posterior with a little of the prior mixed in, as in `Batch.log_true`.

        Raises:
            DegenerateWeightsError: If the filter loses an episode.
        """
        if not self.trial.temperature:
            return self.returns
        trial, B = self.trial, len(self.episodes)
        found = []
        for k, rows in enumerate(pieces(B, AT_ONCE)):
            some, seed = self.episodes[rows], seed_for(trial.seed, 2, k)
            filtering = filtered(
                trial.backend, trial.model, some, prior=trial.prior, seed=seed, moments=False
            )
            found.append(filtering.posterior(trial.prior)[:, -1])
        c = trial.strata[0][:, None]
        p = torch.cat(found).gather(1, c).squeeze(1)
        information = ((1 - PRIOR_SHARE) * p + PRIOR_SHARE * trial.prior[c[:, 0]]).log() + trial.surprise
        return self.returns + trial.temperature * information

    def against(self, learned: TrialEpisodes) -> Worth:
        """What it is worth, beside what was learned.

        It is filtered only if that can make a difference: not if it would lose with all that there is to find
        out. If the filter fails, that is what it counts as.
        """
        bound = self._against(learned, self.most, at_most=self.trial.temperature > 0)
        if bound.beaten or not bound.at_most:
            return bound
        try:
            return self._against(learned, self.worth, at_most=False)
        except FAILURES:
            return bound

    def _against(self, learned: TrialEpisodes, worth: Tensor, *, at_most: bool) -> Worth:
        own, behind = self.trial.mean(worth), self.trial.mean(learned.worth - worth)
        return Worth(own.mean, own.standard_error, behind.mean, behind.standard_error, at_most)


@torch.no_grad()
def judge(
    trial: Trial, policy: Any, before: Mapping[str, Tensor] | Policy, plans: Tensor | None = None
) -> Verdict | None:
    """Play a learned policy, and what takes no learning: is it better than all of that?

    Rivals are every action done all the time, the best fixed plan for the likeliest context, and the policy
    before training. A rival does as well unless it is behind by more than two standard errors, on the same
    episodes. One that cannot be played, because programs or filters fail where it goes, is left out.

    Args:
        trial: What they play.
        policy: The learned policy, a module.
        before: Its weights before training, or the rule that it was started from.
        plans: Actions `[T]`, or for each context the best that are known, `[C, T]`, each with a last axis
            if continuous; None for none.

    Returns:
        The verdict; None if the learned policy itself cannot be judged, or there is nobody to compare with.
    """
    try:
        learned = trial.play(policy)
        own = trial.mean(learned.worth)
    except FAILURES:
        return None
    model = trial.model
    every = {f"doing '{name}' all the time": name for name in probe_names(model)}
    fixed = {name: FixedPlan.always(model, a) for name, a in zip(every, probes(model), strict=True)}
    if plans is not None:
        name, plan = best_plan(trial, plans)
        fixed |= {} if bool((plan.actions == plan.actions[0]).all()) else {name: plan}
    rivals = {}
    with suppress(*FAILURES):
        if isinstance(before, Policy):
            rivals[RULE] = trial.play(before).against(learned)
        else:
            with weights_of(policy, before):
                first = trial.play(policy)
            rivals[BEFORE] = first.against(learned)
    for name, rival in fixed.items():
        with suppress(*FAILURES):
            rivals[name] = trial.play(rival).against(learned)
    if not rivals:
        return None
    worth = Worth(own.mean, own.standard_error)
    solved = all(rival.beaten for rival in rivals.values())
    sentence = (_triumph if solved else _failure)(worth, rivals, every)
    return Verdict(solved, sentence, trial.temperature, trial.num_episodes, {LEARNED: worth, **rivals})


@contextmanager
def weights_of(policy: Any, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, a module has other weights."""
    own = copy.deepcopy(policy.state_dict())
    policy.load_state_dict(weights)
    try:
        yield
    finally:
        policy.load_state_dict(own)


def best_plan(trial: Trial, plans: Tensor) -> tuple[str, FixedPlan]:
    """The plan for the likeliest context out of plans `[C, T]`, with its name; a single one `[T]` is itself.

    Among equally likely contexts it is the one whose plan earns most under the prior.
    """
    if plans.dim() == 1 + (trial.model.box is not None):
        return "a fixed plan", FixedPlan(plans)
    model, prior = trial.model, trial.prior
    likeliest = (prior >= prior.max() * (1 - ROUNDING)).nonzero()[:, 0]
    c = int(likeliest[0])
    if len(likeliest) > 1:
        c = int(likeliest[earnings(model, plans[likeliest], prior, seed_for(trial.seed, 3)).argmax()])
    return f"a fixed plan for '{model.context_names[c]}'", FixedPlan(plans[c])


def earnings(model: CPOMDP, plans: Tensor, prior: Tensor, seed: int) -> Tensor:
    """What fixed plans `[P, T, …]` earn on average, as some episodes tell, float64 `[P]`."""
    P = len(plans)
    contexts = stratified(prior, PLANNED_EPISODES).repeat(P)  # [P · B]
    tally = Tally(model, contexts)
    with inference_scope(model, seed):
        programs = Generative(model)
        state = programs.initial(contexts)
        for action in plans.repeat_interleave(PLANNED_EPISODES, 0).movedim(1, 0):  # [P · B, …] at each time
            moved = programs.move(state, action, contexts)
            state = moved.state
            tally.add(moved)
    return tally.returns.view(P, -1).mean(1)


def _triumph(own: Worth, rivals: Mapping[str, Worth], every: Mapping[str, str]) -> str:
    """The sentence on a policy that beats all of them."""
    single = {name: worth for name, worth in rivals.items() if name in every}
    best = max(single, key=lambda name: single[name].mean, default=None)
    beaten = [f"{name} ({worth})" for name, worth in rivals.items() if name not in every]
    if best is not None:
        beaten.insert(0, f"every action done all the time (the best, '{every[best]}': {single[best]})")
    listed = " and ".join([", ".join(beaten[:-1]), beaten[-1]] if len(beaten) > 1 else beaten)
    worth = f"{own} ± {number(own.standard_error)}"
    return f"The policy is worth {worth}, return and information together, and beats {listed}."


def _failure(own: Worth, rivals: Mapping[str, Worth], every: Mapping[str, str]) -> str:
    """The sentence on a policy that does not."""
    equals = {name: worth for name, worth in rivals.items() if not worth.beaten}
    first = next((name for name in (BEFORE, RULE) if name in equals), None)
    fixed = {name: worth for name, worth in equals.items() if name != first}
    best = max(fixed, key=lambda name: (fixed[name].ahead, fixed[name].mean), default="")
    if first is None:
        why = "the fit is stuck"
        why += "" if fixed[best].ahead else ", or there is nothing better to find"
        told = _compared(best, own, fixed[best])
        return f"{told[0].upper()}{told[1:]}: {why}."
    nothing = "Nothing was learned" if first == BEFORE else "Nothing was gained"
    head = "Training did harm" if equals[first].ahead else nothing
    told = f"{head}: {_compared(first, own, equals[first])}"
    if all(name in fixed and not fixed[name].ahead for name in every):
        return f"{told}, and so does every action done all the time: there may be nothing to learn."
    if not fixed:
        return f"{told}."
    return (
        f"{told}, and {best} does better ({fixed[best]})."
        if fixed[best].ahead
        else f"{told}, and so does {best}."
    )


def _compared(name: str, own: Worth, worth: Worth) -> str:
    """How a rival does beside the policy."""
    how = "better than" if worth.ahead else "as well as"
    figures = f"{worth} against {own}, give or take {number(ERRORS * worth.behind_error)}"
    return f"{name} does {how} what was learned ({figures})"
