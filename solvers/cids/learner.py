"""One iteration of C-IDS: play a batch, filter it, pay for reward and information, improve the policy."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cpomdp_ppl.errors import DegenerateWeightsError
from cpomdp_ppl.inference.choice import more_particles
from cpomdp_ppl.prior import stratified
from cpomdp_ppl.rng import isolated
from cpomdp_ppl.rollout import simulate
from cpomdp_ppl.signature import signature
from cpomdp_ppl.state import leaves
from solvers.cids.belief_policy import BeliefPolicy
from solvers.cids.critic import HistoryCritic, Trunk
from solvers.cids.estimator import Decisions, GradientStep, still_to_come
from solvers.cids.experience import Beginnings
from solvers.cids.policy import Exploring, SequencePolicy, unroll
from solvers.cids.priors import OnePrior, draw_priors
from solvers.cids.quality import LikelihoodQuality
from solvers.cids.schedules import as_schedule

if TYPE_CHECKING:
    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.inference.backend import Backend
    from solvers.cids.batch import Batch
    from solvers.cids.estimator import ActorCritic, Estimator
    from solvers.cids.experience import Experience
    from solvers.cids.objective import Objective
    from solvers.cids.pace import Pace
    from solvers.cids.priors import PriorSampler
    from solvers.cids.schedules import Schedule

TRUNK_FEATURES = 64
"""How many features the critic reads the history into, where the policy has none to offer."""


DRIFT = 0.05
"""How far, as a Kullback–Leibler divergence in nats, the first steps on a batch take decisions over a box."""
SHRINKING = 4
"""Later ones take them less far, by this power of the learning rate: noise keeps them from the best."""
TOO_FAR = 5.0
"""If steps take decisions so many times as far, they are taken again, and smaller."""
LEAST_CAUTION = 1e-3
"""Steps are no smaller than this share of what their schedule says."""


class DivergedError(RuntimeError):
    """A loss or a gradient is not finite. The last checkpoint is from before."""


class Seeds(NamedTuple):
    """The seeds of one iteration, in the order in which they are drawn."""

    play: int
    filter: int
    contexts: int
    gradient: int
    priors: int

    @staticmethod
    def of(seed: int, iteration: int) -> Seeds:
        """Seeds that depend on the fit's seed and the iteration alone, so that a fit can be resumed."""
        return Seeds(*map(int, np.random.SeedSequence([seed, iteration]).generate_state(5)))


class Phases:
    """Seconds that the phases of an iteration took, float64 scalars."""

    def __init__(self) -> None:
        self.seconds: dict[str, Tensor] = {}
        self._started = time.perf_counter()

    def end(self, phase: str) -> None:
        """Note that a phase ends here, and the next one begins."""
        now = time.perf_counter()
        self.seconds[phase] = torch.tensor(now - self._started, dtype=torch.float64)
        self._started = now


@dataclass(frozen=True)
class FarGoal:
    """What is different where rewards are so far away that a policy has to practise first.

    Attributes:
        practice: How the policy is improved in practice.
        estimator: How the gradient is estimated after it.
        temperature: τ after it.
    """

    practice: ActorCritic
    estimator: Estimator
    temperature: Schedule


@dataclass
class Learner:
    """What a fit needs, and what it changes from iteration to iteration."""

    model: CPOMDP
    policy: Any  # a Policy that is an nn.Module
    experience: Experience  # plays and filters batches
    objective: Objective  # what is maximised
    estimator: Estimator  # how its gradient is estimated
    priors: PriorSampler  # draws what is believed about the context before each episode
    temperature: Schedule  # τ
    learning_rate: Schedule  # step size of Adam
    iterations: int
    batch_size: int
    seed: int
    leads: tuple[Tensor, Tensor] | None = None  # to all sorts of places, for policies that read beliefs
    pace: Pace | None = None  # how fast schedules go by; None for evenly
    critic_first: int = 0  # iterations in which the critic learns alone
    adaptive: bool = False  # whether there may be more particles on the way
    far: FarGoal | None = None  # what is different if the policy has practised

    def __post_init__(self) -> None:
        self.iteration = 0
        self.caution = 1.0  # how much smaller steps are than the schedule says
        self.has_practised = False
        self.statistics = self.experience.statistics
        self.quality = LikelihoodQuality(self.batch_size)
        if isinstance(self.policy, BeliefPolicy):
            self.trunk: Trunk | None = None
            self.critic: Any = self.policy.critic
            self.networks = nn.ModuleList([self.policy])
        else:
            self._read_histories()
        self.networks.to(self.model.device)
        self.parameters = [weight for weight in self.networks.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.Adam(self.parameters, lr=self.learning_rate(0.0), fused=True)

    def set_out_far(self) -> None:
        """Go on as is best after practice."""
        assert self.far is not None
        self.has_practised = True
        self.estimator, self.temperature = self.far.estimator, self.far.temperature

    def _read_histories(self) -> None:
        """A critic for a policy that reads histories."""
        with isolated(Seeds.of(self.seed, 2**31).play):
            features = self._num_features()
            amortised = not isinstance(self.priors, OnePrior)
            self.trunk = None if features else Trunk(self.model, TRUNK_FEATURES, amortised)
            num_states = sum(leaf.shape.numel() for _, leaf in leaves(signature(self.model).state))
            self.critic = HistoryCritic(features or TRUNK_FEATURES, self.model.num_contexts, num_states)
        self.networks = nn.ModuleList([self.policy, self.critic, *([self.trunk] if self.trunk else [])])

    def _num_features(self) -> int:
        """How many numbers the policy's own network lets a critic read; 0 for none."""
        if not isinstance(self.policy, SequencePolicy):
            return 0
        prior = self._draw_priors(1)
        episodes = simulate(self.model, self.policy, 1, prior=prior, seed=0)
        return int(self.policy.unroll(episodes, prior.to(torch.get_default_dtype()))[1].shape[-1])

    def _draw_priors(self, num_episodes: int) -> Tensor:
        return draw_priors(self.priors, num_episodes, self.model.num_contexts).to(self.model.device)

    @property
    def progress(self) -> float:
        """How far the fit is, from 0 at the first iteration to 1 at the last."""
        return self.iteration / max(self.iterations - 1, 1) if self.pace is None else self.pace.progress

    @property
    def done(self) -> bool:
        """Whether there is nothing left to do."""
        return self.iteration >= self.iterations or (self.pace is not None and self.pace.ended)

    def _now(self, name: str) -> float:
        """What one of the estimator's schedules says now."""
        return float(as_schedule(name, getattr(self.estimator, name))(self.progress))

    @property
    def acting(self) -> Exploring:
        """The policy with its share of random actions, which is what plays and what is improved."""
        return Exploring.as_scheduled(self.policy, self.estimator, self.progress)

    def iterate(self) -> dict[str, float]:
        """Play a batch, filter it, improve the policy on it, and return what was measured.

        Raises:
            DivergedError: If a loss or a gradient is not finite.
            DegenerateWeightsError: If particles died in too many batches in a row.
        """
        tau, rate = float(self.temperature(self.progress)), float(self.learning_rate(self.progress))
        measured = {"temperature": tau, "learning_rate": rate}
        seeds, number, phases = Seeds.of(self.seed, self.iteration), self.iteration + 1, Phases()

        with isolated(seeds.priors):
            prior = self._draw_priors(self.batch_size)  # [B, C]
            contexts = stratified(prior, self.batch_size, offset=seeds.contexts / 2**32)  # [B]
        try:
            batch = self._batch(contexts, prior, seeds, phases, measured)
        except DegenerateWeightsError as error:
            self.quality.lose(str(error), number)
        else:
            measured |= self.quality.measure(batch)
            self.quality.note_lost(batch, number, self._take_more_particles)
            self.quality.judge(number, number == self.iterations, self._take_more_particles)
            phases.end("likelihood")
            with isolated(self.statistics.own_seed(seeds.gradient)), torch.enable_grad():
                measured |= self._improve(batch, tau, rate)
            phases.end("gradient")
            if self.pace is not None and self.iteration >= self.critic_first:
                worth = measured["return"] + float(self.temperature(1.0)) * measured["information_lower"]
                self.pace.advance(measured["return"], worth, measured.get("return_told", math.nan))
            for phase, seconds in phases.seconds.items():
                measured[f"seconds_{phase}"] = float(self.statistics.mean(seconds))
        self.iteration += 1
        return measured

    def _take_more_particles(self) -> bool:
        """Filter with more particles from now on, if that was left to the fit and there can be more."""
        more = more_particles(self.experience.backend) if self.adaptive else None
        if more is not None:
            self._filter_by(more)
        return more is not None

    def _filter_by(self, backend: Backend) -> None:
        self.experience = replace(self.experience, backend=backend)
        if isinstance(self.policy, BeliefPolicy):
            self.policy.backend = backend

    def _returns(self, batch: Batch) -> dict[str, float]:
        """Mean returns of the problem's own episodes, and of those who were told the context."""
        returns = batch.episodes.returns
        assert returns is not None
        measured = {"return": float(self.statistics.mean(returns[batch.own]))}
        if self._now("told"):
            measured["return_told"] = float(self.statistics.mean(returns[batch.told]))
        return measured

    def _batch(
        self, contexts: Tensor, prior: Tensor, seeds: Seeds, phases: Phases, measured: dict[str, float]
    ) -> Batch:
        """A batch of episodes, with what a filter makes of them; their returns are measured on the way."""
        if isinstance(self.policy, BeliefPolicy):
            with isolated(seeds.filter):
                shares = self._now("told"), self._now("led")
                beginnings = Beginnings.of(contexts, prior, *shares, self.leads)
            batch = self.experience.live(self.acting, beginnings, seeds.play)
            measured |= self._returns(batch)
            phases.end("rollout")
            return batch
        episodes = self.experience.play(self.acting, contexts, prior, seeds.play)
        assert episodes.returns is not None
        measured["return"] = float(self.statistics.mean(episodes.returns))
        phases.end("rollout")
        return self.experience.filter(episodes, prior, seeds.filter)

    def _improve(self, batch: Batch, temperature: float, learning_rate: float) -> dict[str, float]:
        """A few gradient steps of policy and critic on a batch."""
        now = self.decide(batch)
        payoffs = self.objective.payoffs(batch, now.log_probs.detach(), temperature) * batch.alive  # [B, T]
        to_come = still_to_come(payoffs)  # [B, T]
        if not self.critic.has_units:  # it learns its units first
            self.critic.rescale(to_come[batch.alive], self.statistics)
            now = self.decide(batch)
        advantages = self.estimator.advantages(payoffs, now.detached())  # [B, T]
        step = GradientStep.first(advantages, now, self.critic, self.progress)
        take_steps = self._take_steps if self.model.box is None else self._take_care
        norms = take_steps(step, learning_rate)
        self.critic.rescale(to_come[batch.alive], self.statistics)
        if isinstance(self.policy, BeliefPolicy):
            self.policy.follow(batch)
        objective = float(batch.mean(payoffs.sum(1)[batch.own]))
        return {"objective": objective, "gradient_norm": sum(norms) / len(norms)}

    def _take_steps(self, step: GradientStep, learning_rate: float) -> list[float]:
        """Gradient steps on a batch; their gradients' norms."""
        self.optimizer.param_groups[0]["lr"] = learning_rate * self.caution
        norms = []
        for epoch in range(self.estimator.epochs):
            step = step if epoch == 0 else replace(step, now=self.decide(step.batch))
            norms.append(self._descend(self.estimator.terms(step), len(step.batch.episodes)))
        return norms

    def _take_care(self, step: GradientStep, learning_rate: float) -> list[float]:
        """The same over a box: no larger than it takes to stay near what was decided.

        A narrow distribution over a box is a small target, which steps of one size would soon jump about.
        """
        allowed = DRIFT * (learning_rate / self.learning_rate(0.0)) ** SHRINKING
        before = copy.deepcopy((self.networks.state_dict(), self.optimizer.state_dict()))
        norms = self._take_steps(step, learning_rate)
        while (drift := self._drift(step) / allowed) > TOO_FAR and self.caution > LEAST_CAUTION:
            self.networks.load_state_dict(before[0])
            self.optimizer.load_state_dict(copy.deepcopy(before[1]))
            self.caution = max(self.caution / 3, LEAST_CAUTION)
            norms = self._take_steps(replace(step, now=self.decide(step.batch)), learning_rate)
        if drift > 2:
            self.caution = max(self.caution / 1.5, LEAST_CAUTION)
        elif drift < 0.5:
            self.caution = min(self.caution * 1.5, 1.0)
        return norms

    def _drift(self, step: GradientStep) -> float:
        """How far decisions are from those that played, as a Kullback–Leibler divergence in nats."""
        with torch.no_grad():
            log_ratio = (self.decide(step.batch).log_probs - step.before.log_probs) * step.batch.alive
        return float(self.statistics.mean(log_ratio.expm1() - log_ratio) / step.batch.share_alive)

    def decide(self, batch: Batch) -> Decisions:
        """Policy and critic along a batch."""
        if isinstance(self.policy, BeliefPolicy):
            assert batch.inputs is not None
            leaning, values = self.policy.decide(batch.inputs), self.policy.values(batch.inputs)
            log_contexts = states = None
        else:
            leaning, features = unroll(self.policy, batch.episodes, batch.prior.to(torch.get_default_dtype()))
            if self.trunk is not None:
                features = self.trunk(batch)
            assert features is not None
            values, log_contexts, states = self.critic(features.to(self.critic.scale.dtype))
        log_probs, entropies = self.acting.evaluate(leaning, batch.episodes.actions, batch.previous)
        log_probs = torch.where(batch.alive, log_probs, 0.0)  # others may be ruled out, and 0 · inf is NaN
        return Decisions(batch, log_probs, entropies, values, log_contexts, states)

    def _descend(self, terms: dict[str, Tensor], num_episodes: int) -> float:
        """One step down the sum of the terms, which are means over so many episodes; the gradient's norm."""
        self.optimizer.zero_grad()
        each = torch.stack(list(terms.values()))
        each.sum().backward()
        if self.iteration < self.critic_first or self.progress < self.estimator.warm_up:
            self._stand_still()
        losses = self.statistics.average_gradients(each, self.parameters, num_episodes)
        for name, loss in zip(terms, losses.tolist(), strict=True):
            if not math.isfinite(loss):
                raise DivergedError(f"iteration {self.iteration + 1}: the {name} loss is {loss}")
        longest = self.estimator.max_gradient_norm
        norm = float(nn.utils.clip_grad_norm_(self.parameters, math.inf if longest is None else longest))
        if not math.isfinite(norm):
            named = self.networks.named_parameters()
            where = [name for name, w in named if w.grad is not None and not bool(w.grad.isfinite().all())]
            raise DivergedError(
                f"iteration {self.iteration + 1}: the gradient of {', '.join(where)} is not finite"
            )
        self.optimizer.step()
        return norm

    def _stand_still(self) -> None:
        """Leave the policy's decisions as they are in this step."""
        parts = (
            (self.policy.actor, self.policy.logits)
            if isinstance(self.policy, BeliefPolicy)
            else (self.policy,)
        )
        for part in parts:
            part.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes, as tensors and plain numbers."""
        return {
            "iteration": self.iteration,
            "quality": self.quality.state_dict(),
            "networks": self.networks.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "has_practised": self.has_practised,
            "caution": self.caution,
            "particles": getattr(self.experience.backend, "num_particles", 0),
            **({} if self.pace is None else {"pace": self.pace.state_dict()}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self.iteration = state["iteration"]
        self.quality.load_state_dict(state["quality"])
        self.networks.load_state_dict(state["networks"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.caution = state["caution"]
        if state["has_practised"]:
            if self.far is None:
                raise ValueError("has_practised: expected False, as nothing is far away")
            self.set_out_far()
        while 0 < getattr(self.experience.backend, "num_particles", 0) < state["particles"]:
            if not self._take_more_particles():
                break
        if self.pace is not None:
            self.pace.load_state_dict(state["pace"])
