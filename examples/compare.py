"""Rules, planners and learners on one model, on the same episodes: some minutes. Needs the extra `pomcp`.

python examples/compare.py
python examples/compare.py --model LineGrid
"""

from __future__ import annotations

import argparse
import time

import torch

from baselines import rdpg
from baselines.pft import PFT
from baselines.pomcp import POMCP, POUCT
from baselines.qmdp import QMDP
from baselines.simple import Always, ApproachObserveCommit, MostLikelyContext
from cpomdp_ppl import RandomPolicy, compare
from cpomdp_ppl.models import LightDark, LineGrid
from solvers import cids


def main() -> None:
    """Make everybody, and let them play."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=["LightDark", "LineGrid"], default="LightDark")
    parser.add_argument("--simulations", type=int, default=100, help="of every planner, for each decision")
    parser.add_argument("--planned", type=int, default=100, help="episodes that planners play")
    parser.add_argument("--learned", type=int, default=4000, help="episodes that all others play")
    options = parser.parse_args()
    torch.set_num_threads(1)  # tensors are small here: threads would mostly wait for each other

    if options.model == "LightDark":
        model = LightDark()
        known = ("right", "left")  # what to do in either context
        rule = ApproachObserveCommit(model, "right", 1, "observe", known, 0.9, "ekf")
    else:
        model = LineGrid()
        known = ("left", "right")
        rule = ApproachObserveCommit(model, "sense", 1, "sense", known, 0.95, "exact")
    always = [Always(model, action) for action in known]

    began = time.perf_counter()
    solution = cids.fit(model, seed=0)
    learned = rdpg.fit(model, seed=0)
    seconds = {"C-IDS": time.perf_counter() - began - learned.seconds, "RDPG": learned.seconds}

    n = options.simulations
    planners = {
        "POMCP": POMCP(model, n),
        "POUCT": POUCT(model, n, rollout="commitment"),
        "PFT-DPW": PFT(model, n),
        "IPFT": PFT(model, n, temperature=1.0),
    }
    others = {
        "random": RandomPolicy(model.num_actions),
        "likeliest context": MostLikelyContext(model, always),
        "QMDP": QMDP(model),
        "QMDP + information": QMDP(model, temperature=3.0),
        "approach, observe, commit": rule,
        "RDPG": learned.policy,
        "C-IDS": solution.policy,
    }
    episodes = dict.fromkeys(planners, options.planned) | dict.fromkeys(others, options.learned)
    print(f"\n{options.model}; planners with {n} simulations for a decision\n")
    print(compare(model, planners | others, episodes, training_seconds=seconds, progress=True))


if __name__ == "__main__":
    main()
