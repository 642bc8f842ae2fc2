"""C-IDS on LightDark: an iteration beside the same one written by hand, its growth, and gradients' variance.

    python benchmarks/fit.py
    python benchmarks/fit.py --time-to-score  # also whole fits, some minutes more

Everything runs on one thread, in one process; learners take turns, so that a slow moment hits all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import time
import warnings
from typing import TYPE_CHECKING

import light_dark_fit_peer as by_hand
import torch
from simulate import ManyContexts

from cpomdp_ppl import simulate
from cpomdp_ppl.inference import ExtendedKalmanFilter, ParticleFilter
from cpomdp_ppl.models import LightDark
from solvers import cids
from solvers.cids.batch import Batch
from solvers.cids.estimator import ActorCritic, Decisions, GradientStep, Reinforce
from solvers.cids.experience import Experience
from solvers.cids.learner import Learner
from solvers.cids.objective import Information, Variational
from solvers.cids.policy import LSTMPolicy
from solvers.cids.priors import as_sampler
from solvers.cids.schedules import Constant, Geometric, Linear, as_schedule

if TYPE_CHECKING:
    from cpomdp_ppl.inference.backend import Backend
    from solvers.cids.estimator import Estimator
    from solvers.cids.objective import Objective
    from solvers.cids.schedules import Schedule

B, ITERATIONS = 200, 800
PHASES = ("rollout", "likelihood", "gradient")
TARGET = 1.3  # ours / by hand, with compiled filters
SCORE = 10.57  # of the smoothed return
RANDOM = as_schedule("random_actions", ActorCritic().random_actions)


def learner(
    backend: Backend,
    model: LightDark | None = None,
    batch_size: int = B,
    objective: Objective | None = None,
    temperature: Schedule | None = None,
) -> Learner:
    """As `cids.fit` sets it up for the information objective."""
    model = LightDark() if model is None else model
    return Learner(
        model,
        LSTMPolicy(model, seed=0),
        Experience(model, backend),
        Information() if objective is None else objective,
        ActorCritic(),
        as_sampler(model, None),
        Geometric(3.0, 0.5, until=0.7) if temperature is None else temperature,
        Linear(6e-3, 3e-4),
        ITERATIONS,
        batch_size,
        seed=0,
    )


def played(learner: Learner, num_episodes: int, seed: int) -> Batch:
    """A batch by the policy as it is, with its random actions."""
    episodes = simulate(learner.model, learner.acting, num_episodes, contexts="balanced", seed=seed)
    filtering = learner.experience.backend.run(learner.model, episodes, seed=seed, moments=False)
    return Batch.of(episodes, filtering, learner.model.prior().double())


def copied(learner: Learner) -> by_hand.Network:
    """The hand-written network with a learner's weights."""
    encoding = learner.policy.encoding
    net = by_hand.Network(float(encoding.shift_0), float(encoding.scale_0))
    for own, theirs in [(net.lstm, learner.policy.lstm), (net.logits, learner.policy.logits)]:
        own.load_state_dict(theirs.state_dict())
    net.value.load_state_dict(learner.critic.value.state_dict())
    net.context.load_state_dict(learner.critic.context.state_dict())
    net.state.load_state_dict(learner.critic.state.state_dict())
    net.mean, net.spread = learner.critic.mean.clone(), learner.critic.scale.clone()
    return net


def agreement() -> None:
    """That both do the same: likelihoods, belief rewards, loss and gradient on one batch."""
    ours = learner(ExtendedKalmanFilter())
    for _ in range(20):
        ours.iterate()
    net, tau, progress = copied(ours), ours.temperature(ours.progress), ours.progress
    batch = played(ours, B, seed=1)
    now = ours.decide(batch)
    payoffs = ours.objective.payoffs(batch, now.log_probs.detach(), tau)
    advantages = ours.estimator.advantages(payoffs, now.detached())
    step = GradientStep.first(advantages, now, ours.critic, progress)
    terms = ours.estimator.terms(step)
    our_loss = torch.stack(list(terms.values())).sum()
    our_gradient = torch.autograd.grad(our_loss, list(ours.policy.parameters()))

    a, z = batch.episodes.actions.T, batch.episodes.observations["z"].T  # [T, B]
    increments, expected = by_hand.filtered(a, z)
    posterior, rewards, gain = by_hand.assess(batch.contexts, increments, expected)
    inputs = by_hand.encode(net, a, z)
    said = net(inputs, RANDOM(progress))
    A, targets = by_hand.standardised_advantages(rewards + tau * gain, said[1].detach())
    before = said[0].detach().gather(2, a[..., None]).squeeze(2)
    exploration = 0.1 * (1 - progress)
    path = batch.episodes.states.T[:-1]  # [T, B]
    states = (path - path.mean()) / path.std(correction=0)
    loss = by_hand.loss(net, said, a, before, A, targets, posterior[:-1].mT, states, exploration)
    gradient = torch.autograd.grad(loss, [*net.lstm.parameters(), *net.logits.parameters()])

    filtering = batch.filtering
    off = {
        "log-likelihood increments": (increments.permute(2, 0, 1) - filtering.increments).abs().max(),
        "belief rewards (by hand, exact)": (expected.permute(2, 0, 1) - filtering.expected_reward)
        .abs()
        .max(),
        "inputs": (inputs.transpose(0, 1) - ours.policy.encoding.sequence(batch.episodes)).abs().max(),
        "loss": (loss - our_loss).abs(),
        "gradient, relative": distance(gradient, our_gradient) / distance(our_gradient),
    }
    print("Ours (EKF) and by hand, on the same episodes and weights\n")
    print("| what | largest difference |\n|---|---|")
    for name, difference in off.items():
        print(f"| {name} | {float(difference):.1e} |")
    for name, limit in {"log-likelihood increments": 1e-3, "loss": 1e-2, "gradient, relative": 0.1}.items():
        if not off[name] < limit:  # it may be NaN
            sys.exit(f"{name}: ours and by hand differ by {float(off[name]):.1e}, but expected under {limit}")


def distance(x: tuple[torch.Tensor, ...], y: tuple[torch.Tensor, ...] | None = None) -> float:
    """Euclidean, between vectors in parts; of one from zero."""
    parts = x if y is None else [a - b for a, b in zip(x, y, strict=True)]
    return math.sqrt(sum(float(part.square().sum()) for part in parts))


def phases(learners: list[Learner | by_hand.Peer], repeats: int, warm_up: int = 5) -> list[dict[str, float]]:
    """Median seconds of each phase of an iteration, and in total; learners take turns."""
    measured: list[list[dict[str, float]]] = [[] for _ in learners]
    for k in range(warm_up + repeats):
        for each, found in zip(learners, measured, strict=True):
            start = time.perf_counter()
            iteration = each.iterate()
            iteration["seconds_total"] = time.perf_counter() - start
            if k >= warm_up:
                found.append(iteration)
    return [
        {p: statistics.median(m[f"seconds_{p}"] for m in found) for p in (*PHASES, "total")}
        for found in measured
    ]


def against_peer() -> None:
    """An iteration, phase by phase; filters compiled, and as programs are."""
    ours = {
        "EKF": learner(ExtendedKalmanFilter(engine="native")),
        "SMC": learner(ParticleFilter(256, engine="native")),
        "EKF, eager": learner(ExtendedKalmanFilter(engine="eager")),
        "SMC, eager": learner(ParticleFilter(256, engine="eager")),
    }
    peer = by_hand.Peer(copied(ours["EKF"]), ITERATIONS, B, RANDOM)
    hand, *others = phases([peer, *ours.values()], repeats=60)
    taken = dict(zip(ours, others, strict=True))
    print(f"\nOne iteration: {B} episodes, T = 20, one thread; medians, ms\n")
    print("| who | rollout | likelihood | gradient | total |\n|---|---|---|---|---|")
    print("| by hand, EKF |" + "".join(f" {hand[p] * 1e3:.1f} |" for p in hand))
    for name, own in taken.items():
        print(f"| **ours, {name}** |" + "".join(f" {own[p] * 1e3:.1f} |" for p in own))
    for name, own in taken.items():
        ratios = "".join(f" {own[p] / hand[p]:.2f} |" for p in PHASES)
        target = "" if name.endswith("eager") else f" (target: at most {TARGET:g})"
        print(f"| ours, {name} / by hand |{ratios} {own['total'] / hand['total']:.2f}{target} |")


def growth() -> None:
    """Our iteration against each size.

    Where it grows faster than in proportion, from some MB a tensor on, that is the C library giving memory
    back to the system after each use, which hits what is written by hand as well; `MALLOC_MMAP_THRESHOLD_`
    and `MALLOC_TRIM_THRESHOLD_` in the environment put an end to it.
    """
    print(f"\nGrowth of our iteration (SMC; B = {B}, T = 20, C = 2, N = 256 unless varied); medians\n")
    print("| varied | value | rollout, ms | likelihood, ms | gradient, ms | total, ms | ms per unit |")
    print("|---|---|---|---|---|---|---|")
    smc = ParticleFilter(256)
    cases = {
        "B": {size: learner(smc, batch_size=size) for size in (100, 200, 400, 800)},
        "T": {T: learner(smc, LightDark(T)) for T in (10, 20, 40, 80)},
        "C": {C: learner(smc, ManyContexts(C)) for C in (2, 4, 8, 16)},
        "N": {N: learner(ParticleFilter(N)) for N in (128, 256, 512, 1024)},
    }
    for varied, learners in cases.items():
        taken = phases(list(learners.values()), repeats=9, warm_up=2)
        for value, own in zip(learners, taken, strict=True):
            times = " | ".join(f"{own[p] * 1e3:.1f}" for p in own)
            print(f"| {varied} | {value} | {times} | {own['total'] * 1e3 / value:.3f} |")


def variances(num_batches: int = 150, iterations: int = 100) -> None:
    """How noisy gradients are: a policy for each objective, and the same batches for all its estimators."""
    print(f"\nPolicy gradients, {num_batches} batches of {B} at a policy of {iterations} iterations (SMC)\n")
    print("| objective | estimator | rewards | total variance | ‖mean‖² ± s.e. | variance / last ‖mean‖² |")
    print("|---|---|---|---|---|---|")
    tau = {Information: Geometric(3.0, 0.5, until=0.7), Variational: Constant(0.2)}  # the defaults of `fit`
    for kind in (Information, Variational):
        trained = learner(ParticleFilter(), objective=kind(), temperature=tau[kind])
        for _ in range(iterations):
            trained.iterate()
        estimators: list[tuple[str, Estimator, Objective]] = [
            ("Reinforce, as printed", Reinforce(baseline=False), kind(belief_rewards=False)),
            ("Reinforce with baseline", Reinforce(), kind(belief_rewards=False)),
            ("ActorCritic", ActorCritic(), kind(belief_rewards=False)),
            ("ActorCritic", ActorCritic(), kind(belief_rewards=True)),
        ]
        drawn: list[list[torch.Tensor]] = [[] for _ in estimators]
        for seed in range(num_batches):
            batch = played(trained, B, seed)
            now = trained.decide(batch)
            for (_, estimator, objective), found in zip(estimators, drawn, strict=True):
                found.append(policy_gradient(trained, estimator, objective, batch, now))
        moments = [spread_and_signal(torch.stack(found)) for found in drawn]
        signal = moments[-1][1]  # they estimate the same gradient (up to GAE's bias), this one best
        for (name, _, objective), (variance, own, error) in zip(estimators, moments, strict=True):
            rewards = "belief" if objective.belief_rewards else "sampled"
            numbers = f"{variance:.0f} | {own:.1f} ± {error:.1f} | {variance / signal:.1f}"
            print(f"| {kind.__name__} | {name} | {rewards} | {numbers} |")


def spread_and_signal(G: torch.Tensor) -> tuple[float, float, float]:
    """Total variance of gradients `[n, parameters]`, `‖E g‖²`, and its standard error (jackknife)."""
    n, K = len(G), G.double() @ G.double().T  # [n, n]
    K.fill_diagonal_(0)  # products of independent gradients only, whose mean is ‖E g‖²
    signal = K.sum() / (n * (n - 1))
    without = (K.sum() - 2 * K.sum(1)) / ((n - 1) * (n - 2))  # [n]: left out one by one
    error = ((n - 1) * without.var(correction=0)).sqrt()
    return float(G.var(0).sum()), float(signal), float(error)


def policy_gradient(
    learner: Learner, estimator: Estimator, objective: Objective, batch: Batch, now: Decisions
) -> torch.Tensor:
    """Of `−E[Σ_t A_t log π(a_t|h_t)]`, `[parameters]`; advantages are in units of reward for all."""
    before = now.detached()
    payoffs = objective.payoffs(batch, before.log_probs, learner.temperature(learner.progress))
    advantages = estimator.advantages(payoffs, before).to(now.log_probs)
    loss = -(advantages * now.log_probs).sum(1).mean()
    parts = torch.autograd.grad(loss, list(learner.policy.parameters()), retain_graph=True)
    return torch.cat([part.flatten() for part in parts])


class UntilScore:
    """A callback that stops a fit when the mean return of its last iterations reaches a score.

    Attributes:
        reached: Seconds since the callback was made, and iterations; None before.
    """

    def __init__(self, score: float, window: int = 10) -> None:
        self.score, self.window = score, window
        self.returns: list[float] = []
        self.start = time.perf_counter()
        self.reached: tuple[float, int] | None = None

    def __call__(self, iteration: int, measured: dict[str, float], policy: object) -> None:
        """Look at the last few returns."""
        self.returns.append(measured["return"])
        last = self.returns[-self.window :]
        if len(last) == self.window and statistics.mean(last) >= self.score:
            self.reached = time.perf_counter() - self.start, iteration
            raise KeyboardInterrupt


def time_to_score(num_seeds: int = 5) -> None:
    """Whole fits with default settings, as far as it takes."""
    found: dict[str, list[tuple[float, float]]] = {"smc": [], "ekf": []}
    for seed in range(num_seeds):
        for likelihood, times in found.items():
            until = UntilScore(SCORE)
            with contextlib.suppress(cids.Interrupted):
                cids.fit(LightDark(), likelihood=likelihood, seed=seed, progress=False, callbacks=[until])
            times.append((math.inf, math.inf) if until.reached is None else until.reached)
    print(f"\nUntil the mean return of 10 iterations is {SCORE}: default settings, {num_seeds} seeds\n")
    print("| likelihood | median s | median iterations | s by seed |\n|---|---|---|---|")
    for likelihood, times in found.items():
        seconds, iterations = zip(*times, strict=True)
        each = ", ".join(f"{s:.1f}" for s in seconds)
        middle = f"{statistics.median(seconds):.1f} | {statistics.median(iterations):.0f}"
        print(f"| {likelihood} | {middle} | {each} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--time-to-score", action="store_true", help="also run whole fits")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # that likelihoods are rough at times is not what is measured here
    agreement()
    against_peer()
    growth()
    variances()
    if arguments.time_to_score:
        time_to_score()


if __name__ == "__main__":
    main()
