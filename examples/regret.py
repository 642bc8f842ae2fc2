"""One context for all episodes: C-IDS beside agents that do not look on purpose, and the theory beside both.

python examples/regret.py
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch

from baselines.simple import Always, PosteriorSampling
from cpomdp_ppl.models import ContextualTiger, LightDark, LineGrid
from solvers import cids, regret
from solvers.regret.plots import plot_entropy, plot_ratio, plot_regret

OUT = Path("runs/regret")
TEMPERATURES = (0.1, 0.3, 1.0, 3.0, 10.0)


def fitted(model: LightDark, name: str, iterations: int | None, **settings: float) -> cids.Solution:
    """A policy for every prior; what was learned is kept, and a second call finds it."""
    where = OUT / (name if iterations is None else f"{name}, {iterations} iterations")
    return cids.fit(model, prior="dirichlet", seed=0, iterations=iterations, checkpoint=where, **settings)


def light_dark(num_runs: int, num_episodes: int, iterations: int | None) -> None:
    """K episodes in one context, by four agents."""
    model = LightDark()
    solution = fitted(model, "C-IDS", iterations)
    greedy = fitted(model, "no information", iterations, temperature=0.0)
    told = [solution.policy] * model.num_contexts  # sure of what they are told, and then as C-IDS is
    walks = [Always(model, "right"), Always(model, "left")]  # the same, but never looking
    agents = {
        "C-IDS": solution,
        "τ = 0": greedy,
        "Thompson": PosteriorSampling(model, told),
        "Thompson, eyes shut": PosteriorSampling(model, walks),
    }
    runs = {
        name: cids.run(model, None, num_episodes, solution=agent, num_runs=num_runs, seed=1)
        for name, agent in agents.items()
    }

    optimum = float(model.prior() @ regret.context_known_values(model).values.float())
    print(f"\nLight–Dark, {num_runs} runs of {num_episodes} episodes; told the context: {optimum:.2f}")
    print(f"{'':<22}{'regret of episode':^40}{'in all':^16}{'sure and right after':^24}")
    print(f"{'':<22}{'1':>12}{'2':>9}{'3':>9}{'5 and on':>10}{'':<16}{'1':>8}{'2':>8}{'3 episodes':>11}")
    for name, run in runs.items():
        r = run.regret()
        error = r[:, 0].std() / num_runs**0.5
        total = r.sum(1)
        sure = (run.true_probability[:, 1:4] > 0.99).double().mean(0)
        print(
            f"{name:<22}{r[:, 0].mean():>6.2f} ± {error:.2f}{r[:, 1].mean():>9.2f}{r[:, 2].mean():>9.2f}"
            f"{r[:, 4:].mean():>10.3f}{total.mean():>9.2f} ± {total.std() / num_runs**0.5:.2f}"
            + "".join(f"{100 * share:>7.1f} %" for share in sure)
        )

    run, tau = runs["C-IDS"], solution.history["temperature"].values[-1]
    parts = regret.decompose(
        model,
        solution.policy,
        run.posteriors[:, :-1],
        run.contexts,
        best=greedy.policy,
        likelihood="smc",
        progress=True,
    )
    print(f"\nC-IDS, what regret is made of: {parts}")
    bound = regret.Bound(
        temperature=tau,
        num_contexts=model.num_contexts,
        horizon=model.horizon,
        reward_bound=regret.reward_bound(model),
        eta=parts.eta,
    )
    K = np.arange(1, num_episodes + 1)
    allowed, worst = bound(K), 2 * model.horizon * bound.reward_bound * K
    total = parts.data["regret"].mean("run").cumsum("episode").values
    delta = float(parts.data["delta"].mean("run").sum())
    verdict = "below" if (total <= allowed).all() else "NOT always below"
    print(f"\nΣ Δ_k = {delta:.3f}, the learned policy with τ = 0 standing for the best")
    print(
        f"η = {bound.eta:.3f}; at worst, {worst[-1]:.0f} could be lost; the theorem allows {allowed[-1]:.0f}"
    )
    print(f"cumulative regret is {verdict} the theorem's curve")

    curves = {name: run.regret().cumsum(1).numpy() for name, run in runs.items()}
    plot_regret(curves, bound).savefig(OUT / "regret.png", dpi=130)
    entropies = {name: run.entropy.numpy() for name, run in runs.items()}
    plot_entropy(entropies, model.num_contexts).savefig(OUT / "entropy.png", dpi=130)
    print("\n" + str(regret.merge_invariant_contexts(model, 0.1, policy=solution.policy)))


def finite() -> None:
    """Lemma 3.3 and what follows from it, without any sampling."""
    ratios = {}
    short = LineGrid(horizon=4)  # hardly time to look: here information has its price
    cases = {
        "line grid": (LineGrid(), None, 6),
        "line grid, T = 4, prior 0.3 : 0.7": (short, [0.3, 0.7], 6),
        "contextual tiger, T = 4": (ContextualTiger(horizon=4), None, 3),
    }
    for name, (model, prior, K) in cases.items():
        print(f"\n{name}, exact: {K} episodes; Ψ is the largest over all histories")
        print(f"{'τ':>6}{'largest Ψ':>12}{'Σ Δ':>10}{'τ log|C|':>10}{'Σ I':>9}{'Σ regret':>10}{'bound':>9}")
        for tau in TEMPERATURES:
            exact = regret.exact_regret(model, K, temperature=tau, prior=prior)
            limit = tau * math.log(model.num_contexts)
            print(
                f"{tau:>6g}{exact.largest_ratio:>12.4f}{exact.delta.sum():>10.4f}{limit:>10.3f}"
                f"{exact.information.sum():>9.4f}{exact.regret.sum():>10.3f}{exact.bound()(K):>9.0f}",
                flush=True,
            )
            assert not exact.largest_ratio > tau + 1e-9
            assert exact.delta.sum() <= limit + 1e-9
        ratios[name] = exact.ratio
    plot_ratio(ratios, tau).savefig(OUT / "ratio.png", dpi=130)


def learned(iterations: int | None) -> None:
    """How far a learned policy is from what Lemma 3.3 asks of the maximiser."""
    model, tau = LineGrid(horizon=6), 1.0
    solution = cids.fit(
        model, prior="dirichlet", likelihood="exact", temperature=tau, iterations=iterations, seed=0
    )
    print(f"\n{type(model).__name__}, T = {model.horizon}, τ = {tau}: the learned policy, valued exactly")
    print(regret.exact_regret(model, 4, temperature=tau, policy=solution.policy, progress=True))
    print("and the exact maximiser")
    print(regret.exact_regret(model, 4, temperature=tau))


def main() -> None:
    """Light–Dark by simulation, the finite models exactly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=None, help="of the fits, instead of the default")
    options = parser.parse_args()

    torch.set_num_threads(1)  # tensors are small here: threads would mostly wait for each other
    OUT.mkdir(parents=True, exist_ok=True)
    finite()
    learned(options.iterations)
    light_dark(options.runs, options.episodes, options.iterations)
    print(f"\nfigures: {OUT}")


if __name__ == "__main__":
    main()
