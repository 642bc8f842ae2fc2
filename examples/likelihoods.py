"""One model, every backend: how well do they agree on the context?

python examples/likelihoods.py
"""

from __future__ import annotations

import time

import torch

from cpomdp_ppl import CPOMDP, RandomPolicy, simulate
from cpomdp_ppl.context import entropy, mutual_information
from cpomdp_ppl.errors import UnsupportedModelError
from cpomdp_ppl.inference import BACKENDS, as_backend
from cpomdp_ppl.models import ContextualTiger, LightDark


def compare(model: CPOMDP, truth: str, num_episodes: int = 200) -> None:
    """Print a table of every backend on the same episodes, beside the one that is exact for this model."""
    episodes = simulate(model, RandomPolicy(model.num_actions), num_episodes, contexts="balanced", seed=0)
    exact = as_backend(truth).run(model, episodes)
    likelier = exact.log_likelihood.argmax(1, keepdim=True)  # [B, 1]
    print(f"\n{type(model).__name__}: {num_episodes} episodes of random actions; truth: '{truth}'\n")
    columns = ("H(C|Y) bits", "|ΔH| bits", "|ΔP|", "|Δ log p|", "I(C;Y) nats", "seconds")
    print(f"{'backend':8}" + "".join(f"{column:>15}" for column in columns))
    for name in BACKENDS:
        start = time.perf_counter()
        try:
            filtering = as_backend(name).run(model, episodes, seed=0)
        except UnsupportedModelError as refusal:
            print(f"{name:8} refused: {refusal}")
            continue
        seconds = time.perf_counter() - start
        p, q = filtering.posterior()[:, -1], exact.posterior()[:, -1]
        bits, true_bits = entropy(p, "bits"), entropy(q, "bits")
        gap = (filtering.log_likelihood - exact.log_likelihood).gather(1, likelier)
        bracket = mutual_information(filtering, episodes.contexts)
        values = (bits.mean(), (bits - true_bits).abs().mean(), (p - q).abs().mean(), gap.abs().mean())
        print(f"{name:8}" + "".join(f"{value:15.4f}" for value in values), end="")
        print(f"{f'{bracket.lower:.3f} … {bracket.upper:.3f}':>15}{seconds:15.2f}")


def main() -> None:
    """A continuous and a finite model."""
    torch.set_num_threads(1)
    compare(LightDark(), truth="grid")
    compare(ContextualTiger(), truth="exact")


if __name__ == "__main__":
    main()
