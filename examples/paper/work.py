"""What tasks do: fit, evaluate, play. Each depends on its settings alone, and is seeded by them.

Every function takes settings, a folder of its own, and the folder of the fit that it needs, if any.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import torch

from baselines import rdpg
from baselines.pft import PFT
from baselines.qmdp import QMDP
from baselines.simple import Always, ApproachObserveCommit, ContextKnown
from cpomdp_ppl import RandomPolicy, evaluate, models, simulate
from cpomdp_ppl.context import entropy
from cpomdp_ppl.encoding import Encoding
from cpomdp_ppl.experiments.files import load_tensors, save_tensors
from cpomdp_ppl.inference.choice import follow_by
from cpomdp_ppl.rng import isolated, seed_for
from solvers import cids, exact
from solvers.cids.estimator import ActorCritic, Reinforce
from solvers.cids.objective import Information, Variational

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from cpomdp_ppl import CPOMDP
    from solvers.cids.estimator import Estimator
    from solvers.cids.objective import Objective

CHECKPOINT, SOLUTION, ACTOR = "checkpoint", "solution", "actor.pt"
TUNING = 1  # the seed of episodes that a rule is tuned on, and nobody judged by
CONFIDENCES = (0.8, 0.85, 0.9, 0.95, 0.98)

OBJECTIVES: dict[str, Objective] = {
    "information": Information(),
    "variational": Variational(),
    "variational, belief rewards": Variational(belief_rewards=True),
}
ESTIMATORS: dict[str, Estimator] = {"critic": ActorCritic(), "as printed": Reinforce()}


def make_model(settings: Mapping[str, Any]) -> CPOMDP:
    """The model by its name, with its arguments."""
    model: CPOMDP = getattr(models, settings["model"])(**settings["arguments"])
    return model


def fit_cids(settings: Mapping[str, Any], folder: Path, need: Path | None) -> dict[str, Any]:
    """C-IDS; its learning curve."""
    model = make_model(settings)
    with warnings.catch_warnings():
        if settings["likelihood"] == "ekf":  # known to be off on Light–Dark: the table shows what comes of it
            warnings.filterwarnings("ignore", message="iteration .*: the information about the context")
        solution = cids.fit(
            model,
            likelihood=settings["likelihood"],
            objective=OBJECTIVES[settings["objective"]],
            policy="lstm",  # as in the paper
            estimator=ESTIMATORS[settings["estimator"]],
            iterations=settings["iterations"],
            batch_size=settings["batch_size"],
            seed=settings["seed"],
            progress=False,
            checkpoint=folder / CHECKPOINT,
            verdict=False,
        )
    solution.save(folder / SOLUTION)
    history = solution.history
    return {
        "episodes": (history.iteration.values * settings["batch_size"]).tolist(),
        "return": history["return"].values.tolist(),
        "entropy": history["entropy"].values.tolist(),
        "best_return": best_return(model),
    }


def fit_rdpg(settings: Mapping[str, Any], folder: Path, need: Path | None) -> dict[str, Any]:
    """RDPG; its learning curve. The policy is that of `rdpg.fit`, which does not measure entropies."""
    model = make_model(settings)
    seed, total, num_episodes = settings["seed"], settings["episodes"], settings["curve_episodes"]
    entropies: list[float] = []

    def measure() -> None:
        if len(fitting.measured) > len(entropies):
            found = evaluate(model, fitting.policy, num_episodes, likelihood="smc", seed=seed_for(seed, 1))
            entropies.append(found.entropy.mean)

    with isolated(seed), torch.enable_grad():
        fitting = rdpg.Fitting(model, rdpg.Settings(), total)
        while fitting.played < total:
            fitting.iterate()
            measure()
        fitting.evaluate()
        measure()
    save_tensors(folder / ACTOR, fitting.best_policy.actor.state_dict())
    history = fitting.history()
    return {
        "episodes": history.episodes.values.tolist(),
        "return": history.greedy_return.values.tolist(),
        "entropy": entropies,
        "best_return": best_return(model),
    }


def best_return(model: CPOMDP) -> float:
    """What an agent earns that is told the context, on average over the prior."""
    best = model.context_known_return()
    assert best is not None
    return float((model.prior().detach().to(best) * best).sum())


def evaluate_policy(settings: Mapping[str, Any], folder: Path, need: Path | None) -> dict[str, Any]:
    """What a policy earns and finds out, on average and in each episode."""
    model = make_model(settings)
    policy, note = make_policy(model, settings["policy"], need)
    B = settings["episodes"]
    found = evaluate(model, policy, B, reveal_context=isinstance(policy, ContextKnown), batch_size=B, seed=0)
    result = found.as_dict()
    del result["seconds_per_decision"]  # it would be another one the next time
    assert found.per_episode is not None
    each = {
        "contexts": found.per_episode.contexts.tolist(),
        "returns": found.per_episode.returns.tolist(),
        "entropy": found.per_episode.entropies.tolist(),
    }
    return {**result, "each": each, "note": note}


def plan_exactly(settings: Mapping[str, Any], folder: Path, need: Path | None) -> dict[str, Any]:
    """The most that any policy can earn in a finite model, and how uncertain it then leaves the context."""
    model = make_model(settings)
    best = exact.plan(model)
    left = float(entropy(best.prior, "bits")) - best.information / math.log(2)
    return {"return": best.expected_return, "entropy": left}


def play(settings: Mapping[str, Any], folder: Path, need: Path | None) -> dict[str, Any]:
    """Some episodes of a policy in every context: where it went, and what could be believed."""
    model = make_model(settings)
    policy, _ = make_policy(model, settings["policy"], need)
    contexts = [c for c in range(model.num_contexts) for _ in range(settings["trajectories"])]
    episodes = simulate(model, policy, len(contexts), contexts=contexts, seed=settings["seed"])
    follow = follow_by(model, None)
    filtering, _ = follow(model, episodes, prior=None, seed=seed_for(settings["seed"], 1))
    posterior = filtering.posterior()  # [B, T + 1, C]
    assert isinstance(episodes.states, torch.Tensor)
    return {
        "contexts": contexts,
        "context_names": list(model.context_names),
        "states": episodes.states.tolist(),
        "done": getattr(model, "done", None),  # the state in which nothing is left to do
        "actions": episodes.actions.tolist(),
        "truth": posterior[torch.arange(len(contexts)), :, torch.tensor(contexts)].tolist(),
    }


def make_policy(model: CPOMDP, settings: Mapping[str, Any], need: Path | None) -> tuple[Any, str]:
    """A policy by its kind, and what there is to say about it."""
    kind = settings["kind"]
    rest = {name: value for name, value in settings.items() if name != "kind"}
    if need is not None:
        learned = cids.load(need / SOLUTION, model).policy if kind == "C-IDS" else load_rdpg(model, need)
        return learned, ""
    if kind in ("POMCP", "POUCT"):
        from baselines import pomcp  # an extra

        return getattr(pomcp, kind)(model, **rest), ""
    if kind == "random":
        return RandomPolicy(model.num_actions), ""
    if kind == "told":
        return ContextKnown(model, [Always(model, action) for action in rest["actions"]]), ""
    if kind == "approach, observe, commit":
        return tuned_rule(model, **rest)
    return {"PFT": PFT, "QMDP": QMDP, "always": Always}[kind](model, **rest), ""


def load_rdpg(model: CPOMDP, folder: Path) -> rdpg.RecurrentPolicy:
    """The policy that `fit_rdpg` kept."""
    encoding = Encoding(model)
    actor = rdpg.Recurrent(encoding.size, rdpg.Settings().hidden, model.num_actions)
    actor.load_state_dict(load_tensors(folder / ACTOR, model.device))
    return rdpg.RecurrentPolicy(encoding, actor).requires_grad_(False)


def tuned_rule(
    model: CPOMDP, approach: str, look: str, commit: Sequence[str], episodes: int
) -> tuple[ApproachObserveCommit, str]:
    """The best of its two numbers, by episodes that nobody is judged by."""

    def rule(steps: int, confidence: float) -> ApproachObserveCommit:
        return ApproachObserveCommit(model, approach, steps, look, commit, confidence, "ekf")

    grid = [(steps, confidence) for steps in range(4) for confidence in CONFIDENCES]
    returns = {
        pair: evaluate(model, rule(*pair), episodes, likelihood="ekf", seed=TUNING).returns.mean
        for pair in grid
    }
    best = max(grid, key=returns.__getitem__)
    return rule(*best), f"{best[0]} steps, confidence {best[1]}"
