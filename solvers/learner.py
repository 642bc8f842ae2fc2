"""One fit at work: its state between two iterations, and the step from one to the next."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from cpomdp_ppl import simulate
from cpomdp_ppl.context import entropy, stratified
from cpomdp_ppl.encoding import Encoding
from cpomdp_ppl.errors import DegenerateWeightsError
from cpomdp_ppl.isolation import isolated
from cpomdp_ppl.signature import signature
from cpomdp_ppl.state import leaves
from solvers.estimators import Critic, Decisions, GradientStep
from solvers.objectives import Batch
from solvers.policies import Mixed, SequencePolicy, unroll
from solvers.priors import OnePrior, draw_priors, log_odds
from solvers.schedules import as_schedule

if TYPE_CHECKING:
    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.policy import Policy
    from solvers.estimators import Estimator
    from solvers.objectives import Objective
    from solvers.priors import PriorSampler
    from solvers.schedules import Schedule

WIDE = 0.1  # nats between the two estimates of the information, beyond which likelihoods are too poor
FEW = 4  # particles that count; with fewer, likelihoods and belief rewards rest on chance
PATIENCE = 20  # batches that are averaged before a warning, and that may be lost in a row


class DivergedError(RuntimeError):
    """A loss or a gradient is not finite. The last checkpoint is from before."""


class Trunk(nn.Module):
    """A network of the critic's own, for policies that do not let it read theirs.

    Args:
        model: Whose percepts.
        hidden: How many features H.
        amortised: Whether it reads the prior as well.
    """

    def __init__(self, model: CPOMDP, hidden: int, amortised: bool) -> None:
        super().__init__()
        self.encoding = Encoding(model)
        self.amortised = amortised
        size = self.encoding.size + (model.num_contexts if amortised else 0)
        self.lstm = nn.LSTM(size, hidden, batch_first=True)

    def forward(self, batch: Batch) -> Tensor:
        """Features `[B, T, H]` of the history at times 0 … T - 1."""
        percepts = self.encoding.sequence(batch.episodes)
        if self.amortised:
            believed = log_odds(batch.prior, percepts.dtype)[:, None].expand(-1, percepts.shape[1], -1)
            percepts = torch.cat([percepts, believed], -1)
        features: Tensor = self.lstm(percepts)[0]
        return features


@dataclass
class Learner:
    """Everything that a fit changes as it goes, and everything that it needs for it.

    Random numbers of iteration k come from the seed and k alone, so that a fit that is taken up again at k
    goes on as if it had not stopped.

    Args:
        model: The CPOMDP.
        policy: What is learned; a module.
        backend: Of the likelihoods.
        objective: What is maximised.
        estimator: How its gradient is estimated.
        priors: Draws what is believed about the context before each episode.
        temperature: τ.
        learning_rate: Of Adam.
        iterations: How many there will be.
        batch_size: How many episodes an iteration plays.
        seed: Of everything random.
    """

    model: CPOMDP
    policy: Any  # a Policy that is an nn.Module
    backend: Backend
    objective: Objective
    estimator: Estimator
    priors: PriorSampler
    temperature: Schedule
    learning_rate: Schedule
    iterations: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        self.iteration = 0
        self.lost = 0  # batches in a row whose particles died
        # Of the latest batches: gap of the information, its squared standard error, effective sample size.
        self.lately: list[tuple[float, float, float]] = []
        self.warned: set[str] = set()
        with isolated(self._seeds(2**31)[0]):
            features = self._num_features()
            amortised = not isinstance(self.priors, OnePrior)
            self.trunk = None if features else Trunk(self.model, 64, amortised)
            num_states = sum(leaf.shape.numel() for _, leaf in leaves(signature(self.model).state))
            self.critic = Critic(features or 64, self.model.num_contexts, num_states)
        self.networks = nn.ModuleList([self.policy, self.critic, *([self.trunk] if self.trunk else [])])
        self.networks.to(self.model.device)
        self.parameters = [weight for weight in self.networks.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.Adam(self.parameters, lr=self.learning_rate(0.0), fused=True)

    def _num_features(self) -> int:
        """How many numbers the policy's own network lets a critic read; 0 for none."""
        if not isinstance(self.policy, SequencePolicy):
            return 0
        prior = self._draw_priors(1)
        episodes = simulate(self.model, self.policy, 1, prior=prior, seed=0)
        return int(self.policy.unroll(episodes, prior.to(torch.get_default_dtype()))[1].shape[-1])

    def _draw_priors(self, num_episodes: int) -> Tensor:
        """`[B, C]`."""
        return draw_priors(self.priors, num_episodes, self.model.num_contexts).to(self.model.device)

    def _seeds(self, iteration: int) -> list[int]:
        return [int(word) for word in np.random.SeedSequence([self.seed, iteration]).generate_state(5)]

    @property
    def progress(self) -> float:
        """How far the fit is, from 0 at the first iteration to 1 at the last."""
        return self.iteration / max(self.iterations - 1, 1)

    def iterate(self) -> dict[str, float]:
        """Play a batch, filter it, and improve the policy on it.

        Returns:
            What was measured on the batch.

        Raises:
            DivergedError: If a loss or a gradient is not finite.
            DegenerateWeightsError: If particles died in too many batches in a row.
        """
        temperature, rate = float(self.temperature(self.progress)), float(self.learning_rate(self.progress))
        seeds = self._seeds(self.iteration)
        started = time.perf_counter()
        acting = self.acting
        with isolated(seeds[4]):
            prior = self._draw_priors(self.batch_size)
            contexts = stratified(prior, self.batch_size, offset=seeds[2] / 2**32)
        episodes = simulate(
            self.model, acting, self.batch_size, contexts=contexts, prior=prior, seed=seeds[0]
        )
        played = time.perf_counter()
        measured = {"temperature": temperature, "learning_rate": rate}
        assert episodes.returns is not None
        measured["return"] = float(episodes.returns.mean())
        try:
            filtering = self.backend.run(self.model, episodes, seed=seeds[1], moments=False)
            batch = Batch.of(episodes, filtering, prior)
        except DegenerateWeightsError as error:
            self._lose_batch(error)
            self.iteration += 1
            return measured
        self.lost = 0
        measured |= self._information(batch)
        filtered = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with isolated(seeds[3]), torch.enable_grad():
            measured |= self._improve(batch, temperature)
        measured["seconds_rollout"] = played - started
        measured["seconds_likelihood"] = filtered - played
        measured["seconds_gradient"] = time.perf_counter() - filtered
        self.iteration += 1
        return measured

    @property
    def acting(self) -> Mixed:
        """The policy with its share of random actions, which is what plays and what is improved."""
        return Mixed(self.policy, as_schedule("random_actions", self.estimator.random_actions)(self.progress))

    def decide(self, batch: Batch) -> Decisions:
        """Policy and critic along a batch."""
        prior = batch.prior.to(torch.get_default_dtype())
        logits, features = unroll(self.acting, batch.episodes, prior)
        if self.trunk is not None:
            features = self.trunk(batch)
        assert features is not None
        values, log_contexts, states = self.critic(features.to(self.critic.scale.dtype))
        log_policy = logits.log_softmax(-1)
        log_probs = log_policy.gather(2, batch.episodes.actions[..., None]).squeeze(2)
        return Decisions(log_policy, log_probs, values, log_contexts, states)

    def _improve(self, batch: Batch, temperature: float) -> dict[str, float]:
        now = self.decide(batch)
        payoffs = self.objective.payoffs(batch, now.log_probs.detach(), temperature)
        to_come = payoffs.flip(1).cumsum(1).flip(1)  # [B, T]
        if not self.critic.settled:  # it learns its units first
            self.critic.rescale(to_come)
            now = self.decide(batch)
        before = now.detached()
        advantages = self.estimator.advantages(payoffs, before)
        norms = []
        for epoch in range(self.estimator.epochs):
            now = now if epoch == 0 else self.decide(batch)
            step = GradientStep(batch, advantages, before, now, self.critic, self.progress)
            norms.append(self._descend(self.estimator.terms(step)))
        self.critic.rescale(to_come)
        return {"objective": float(payoffs.sum(1).mean()), "gradient_norm": sum(norms) / len(norms)}

    def _descend(self, terms: dict[str, Tensor]) -> float:
        for name, term in terms.items():
            if not math.isfinite(term.item()):
                raise DivergedError(f"iteration {self.iteration + 1}: the {name} loss is {term.item()}")
        self.optimizer.zero_grad()
        torch.stack(list(terms.values())).sum().backward()
        if self.progress < self.estimator.warm_up:
            self.policy.zero_grad()
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

    def _information(self, batch: Batch) -> dict[str, float]:
        """Estimates of `I(C; Y)` from both sides, and what they say about the likelihoods."""
        left = entropy(batch.log_posterior[:, -1].exp())  # [B]
        upper = entropy(batch.prior) - left  # [B]
        lower = batch.log_true()[:, -1] - batch.prior_true().log()  # [B]
        measured = {
            "entropy": float(left.mean()) / math.log(2),
            "information_upper": float(upper.mean()),
            "information_lower": float(lower.mean()),
        }
        if batch.filtering.ess is not None:
            c = batch.contexts[:, None, None].expand(-1, batch.episodes.horizon, 1)
            measured["ess"] = float(batch.filtering.ess.gather(2, c).mean())
        gap = upper - lower
        error = float(gap.var()) / len(gap) if len(gap) > 1 else math.inf
        self.lately = [
            *self.lately[1 - PATIENCE :],
            (float(gap.mean()), error, measured.get("ess", math.inf)),
        ]
        if len(self.lately) == PATIENCE or self.iteration == self.iterations - 1:
            self._judge_likelihoods()
        return measured

    def _judge_likelihoods(self) -> None:
        gap, error, ess = (sum(series) / len(self.lately) for series in zip(*self.lately, strict=True))
        chance = 3 * (error / len(self.lately)) ** 0.5
        if gap > WIDE + chance or ess < FEW:
            particles = "" if ess == math.inf else f", and {ess:.1f} particles count on average"
            self._warn(
                "poor",
                f"iteration {self.iteration + 1}: the information about the context is only known within "
                f"{gap:.2f} nats{particles}: likelihoods are noisy or biased. Use more particles, "
                'ParticleFilter(guide="ekf"), or another backend',
            )

    def _lose_batch(self, error: DegenerateWeightsError) -> None:
        self.lost += 1
        if self.lost >= PATIENCE:
            raise DegenerateWeightsError(
                f"iteration {self.iteration + 1}, {self.lost} batches in a row: {error}"
            )
        self._warn(
            "lost",
            f"iteration {self.iteration + 1}: a batch is left out, because all particles died ({error}). Use "
            'more particles, ParticleFilter(guide="ekf"), or another backend',
        )

    def _warn(self, kind: str, message: str) -> None:
        """Once in a fit."""
        if kind not in self.warned:
            self.warned.add(kind)
            warnings.warn(message, stacklevel=7 if kind == "poor" else 6)

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes, as tensors and plain numbers."""
        return {
            "iteration": self.iteration,
            "lost": self.lost,
            "lately": [list(batch) for batch in self.lately],
            "warned": sorted(self.warned),
            "networks": self.networks.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self.iteration = state["iteration"]
        self.lost = state["lost"]
        self.lately = [(gap, error, ess) for gap, error, ess in state["lately"]]
        self.warned = set(state["warned"])
        self.networks.load_state_dict(state["networks"])
        self.optimizer.load_state_dict(state["optimizer"])


def policy_weights(policy: Policy) -> dict[str, Tensor]:
    """A copy of a policy's weights."""
    assert isinstance(policy, nn.Module)
    return {name: weight.detach().clone() for name, weight in policy.state_dict().items()}
