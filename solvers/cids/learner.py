"""One fit at work: its state between two iterations, and the step from one to the next."""

from __future__ import annotations

import math
import re
import time
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from cpomdp_ppl import simulate
from cpomdp_ppl.context import entropy
from cpomdp_ppl.encoding import Encoding
from cpomdp_ppl.episodes import Episodes
from cpomdp_ppl.errors import DegenerateWeightsError
from cpomdp_ppl.inference import Filtering
from cpomdp_ppl.inference.persistence import filtered
from cpomdp_ppl.prior import stratified
from cpomdp_ppl.rng import isolated, seed_for
from cpomdp_ppl.signature import signature
from cpomdp_ppl.state import leaves
from solvers.cids import shards
from solvers.cids.batchwide import ALONE, takes_whole
from solvers.cids.estimator import Critic, Decisions, GradientStep
from solvers.cids.objective import Batch
from solvers.cids.policy import Mixed, SequencePolicy, unroll
from solvers.cids.priors import OnePrior, draw_priors, log_odds
from solvers.cids.schedules import as_schedule

if TYPE_CHECKING:
    from cpomdp_ppl import CPOMDP
    from cpomdp_ppl.inference.backend import Backend
    from cpomdp_ppl.policy import Policy
    from solvers.cids.batchwide import Batchwide
    from solvers.cids.estimator import Estimator
    from solvers.cids.objective import Objective
    from solvers.cids.priors import PriorSampler
    from solvers.cids.schedules import Schedule
    from solvers.cids.shards import Shard

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
    goes on as if it had not stopped. Of several processes each plays some shards of every batch, and they
    take every step together: their weights are the same at any time.

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
        whole: Those who have every batch between them.
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
    whole: Batchwide = ALONE

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
        with isolated(seeds[4]):
            priors = self._draw_priors(self.batch_size)
            contexts = stratified(priors, self.batch_size, offset=seeds[2] / 2**32)
        own = self._shards()
        parts = [self._play(shard, contexts, priors, seeds[0]) for shard in own]
        episodes = parts[0] if len(parts) == 1 else Episodes.concatenate(parts)
        played = time.perf_counter()
        measured = {"temperature": temperature, "learning_rate": rate}
        assert episodes.returns is not None
        measured["return"] = float(self.whole.mean(episodes.returns)[0])
        died = None
        try:
            prior = torch.cat([priors[shard.rows] for shard in own])
            filtering = self._filter(own, parts, episodes, prior, seeds[1])
            batch = Batch.of(episodes, filtering, prior)
        except DegenerateWeightsError as error:
            died = str(error)
            if self.batch_size > shards.SHARD:  # it is not the batch's episodes that are counted there
                died = re.sub(r" of episode \d+", "", died)
        died = self.whole.heard(died)
        if died is not None:
            self._lose_batch(died)
            self.iteration += 1
            return measured
        self.lost = 0
        measured |= self._information(batch)
        filtered = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        rank = self.whole.rank
        with isolated(seed_for(seeds[3], rank) if rank else seeds[3]), torch.enable_grad():
            measured |= self._improve(batch, temperature)
        taken = [played - started, filtered - played, time.perf_counter() - filtered]
        seconds = self.whole.total(torch.tensor(taken, dtype=torch.float64)) / self.whole.size
        for phase, each in zip(("rollout", "likelihood", "gradient"), seconds.tolist(), strict=True):
            measured[f"seconds_{phase}"] = each
        self.iteration += 1
        return measured

    def _shards(self) -> list[Shard]:
        """This process's; the first processes have one less, if need be, as the first has files to write."""
        rank, size = self.whole.rank, self.whole.size
        backwards = shards.split(self.batch_size)[::-1]
        return backwards[size - 1 - rank :: size][::-1]

    def _filter(
        self, own: list[Shard], parts: list[Episodes], episodes: Episodes, prior: Tensor, seed: int
    ) -> Filtering:
        """Shard by shard where random numbers are drawn, or all at once, which takes less time."""
        priors = prior.split([len(part) for part in parts])
        runs = list(zip(own, parts, priors, strict=True))
        if not vars(type(self.backend)).get("draws", True):
            runs = [(own[0], episodes, prior)]
        return Filtering.concatenate(
            [
                filtered(self.backend, self.model, some, prior=p, seed=shard.seed(seed), moments=False)
                for shard, some, p in runs
            ]
        )

    def _play(self, shard: Shard, contexts: Tensor, priors: Tensor, seed: int) -> Episodes:
        """Episodes of one shard, of a batch's contexts `[B]` and priors `[B, C]`."""
        rows = shard.rows
        return simulate(
            self.model,
            self.acting,
            len(shard),
            contexts=contexts[rows],
            prior=priors[rows],
            seed=shard.seed(seed),
        )

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
        # Objectives and estimators of the user's own need not know that there may be others.
        whole = {"whole": self.whole}
        others = whole if takes_whole(self.objective.payoffs) else {}
        payoffs = self.objective.payoffs(batch, now.log_probs.detach(), temperature, **others)
        to_come = payoffs.flip(1).cumsum(1).flip(1)  # [B, T]
        if not self.critic.settled:  # it learns its units first
            self.critic.rescale(to_come, self.whole)
            now = self.decide(batch)
        others = whole if takes_whole(self.estimator.advantages) else {}
        advantages = self.estimator.advantages(payoffs, now.detached(), **others)
        step = GradientStep.first(batch, advantages, now, self.critic, self.progress, self.whole)
        norms = []
        for epoch in range(self.estimator.epochs):
            step = step if epoch == 0 else replace(step, now=self.decide(batch))
            norms.append(self._descend(self.estimator.terms(step), len(batch.episodes) / self.batch_size))
        self.critic.rescale(to_come, self.whole)
        objective = float(self.whole.mean(payoffs.sum(1))[0])
        return {"objective": objective, "gradient_norm": sum(norms) / len(norms)}

    def _descend(self, terms: dict[str, Tensor], share: float) -> float:
        """One step down the terms' sum, which this process knows for a share of the batch's episodes."""
        self.optimizer.zero_grad()
        each = torch.stack(list(terms.values()))
        each.sum().backward()
        if self.progress < self.estimator.warm_up:
            self.policy.zero_grad()
        losses = self.whole.average(each, self.parameters, share, list(terms))
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

    def _information(self, batch: Batch) -> dict[str, float]:
        """Estimates of `I(C; Y)` from both sides, and what they say about the likelihoods."""
        left = entropy(batch.log_posterior[:, -1].exp())  # [B]
        upper = entropy(batch.prior) - left  # [B]
        lower = batch.log_true()[:, -1] - batch.prior_true().log()  # [B]
        kinds = {"entropy": left, "information_upper": upper, "information_lower": lower}
        if batch.filtering.ess is not None:
            c = batch.contexts[:, None, None].expand(-1, batch.episodes.horizon, 1)
            kinds["ess"] = batch.filtering.ess.gather(2, c)
        measured = dict(zip(kinds, self.whole.mean(*kinds.values()).tolist(), strict=True))
        measured["entropy"] /= math.log(2)
        spread, gap = (float(moment) for moment in self.whole.std_mean(upper - lower))
        error = spread**2 / (self.batch_size - 1) if self.batch_size > 1 else math.inf
        self.lately = [*self.lately[1 - PATIENCE :], (gap, error, measured.get("ess", math.inf))]
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

    def _lose_batch(self, error: str) -> None:
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
        """Once in a fit, whoever takes part in it."""
        if kind not in self.warned:
            self.warned.add(kind)
            if self.whole.rank > 0:
                return
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
