"""The paper's experiment: learn a policy for Light–Dark, and set it beside what is known about the problem.

python examples/light_dark.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from cpomdp_ppl.models import LightDark
from solvers import cids

RUNS = Path("runs")

REFERENCES = """
known                                        return    H(C|Y) bits
  told the context in advance                 17.96         –
  near-optimal, belief-space DP               11.28       0.058
  the paper's C-IDS                           10.57       0.020
  the paper's RDPG-RNN                        −3.57       0.164
  the paper's POMCP                           −6.50       1.000
  one way whatever happens                    −0.77       ≈ 0.95
"""


def main() -> None:
    """Fit, evaluate, draw, and keep the solution."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=None, help="instead of the default")
    options = parser.parse_args()

    torch.set_num_threads(1)  # tensors are small here: threads would mostly wait for each other
    model = LightDark()
    solution = cids.fit(model, seed=options.seed, iterations=options.iterations)
    result = solution.evaluate()

    print(f"\nLight–Dark, C-IDS with a particle filter, seed {options.seed};")
    print(f"{result.returns.num_episodes:,} episodes, posteriors by {result.likelihood}\n")
    print(result)
    print(REFERENCES)

    RUNS.mkdir(exist_ok=True)
    solution.plot(likelihood="grid").savefig(RUNS / "light_dark.png", dpi=120)
    solution.save(RUNS / "light_dark")
    print(f"figure: {RUNS / 'light_dark.png'}; solution: {RUNS / 'light_dark'}")


if __name__ == "__main__":
    main()
