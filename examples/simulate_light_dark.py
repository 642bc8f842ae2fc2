"""Simulate Light–Dark under a policy written by hand, and draw what happened in each context.

python examples/simulate_light_dark.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.ticker import MaxNLocator

from cpomdp_ppl import Episodes, History, simulate
from cpomdp_ppl.models import LightDark
from cpomdp_ppl.models.light_dark import LEFT, OBSERVE, RIGHT

LOOKS = 6
"""How often the policy looks before it decides."""


def look_then_go(history: History) -> torch.Tensor:
    """Two steps to the right, look a few times, and turn back if what is seen scatters as in the dark."""
    looked = history.observed["z"].sum(1)  # [B]
    here = 2.0 * history.observed["z"]  # where the robot should be when it looks
    scatter = ((history.observations["z"] - here) ** 2).sum(1) / looked.clamp(min=1)
    commit = torch.where(scatter < 3.0, RIGHT, LEFT)
    if history.time < 2:
        return torch.full_like(commit, RIGHT)
    return torch.where(looked < LOOKS, OBSERVE, commit)


def draw(model: LightDark, episodes: Episodes, shown: int = 12) -> plt.Figure:
    """Trajectories over time, a panel for each context."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    time = range(episodes.horizon + 1)
    for c, (axis, name) in enumerate(zip(axes, model.context_names, strict=True)):
        here = episodes[episodes.contexts == c]
        states = here.states[:shown]
        side = 1 - 2 * c
        axis.axhspan(0, -25 * side, color="0.75", lw=0, label="dark (penalty)")
        axis.axhspan(model.goal * side, 25 * side, color="#fdf3d0", lw=0, label="reward")
        for b, track in enumerate(states):
            found = bool(here.rewards[b, -1] > 0)
            axis.plot(time, track, color="#0072B2" if found else "#D55E00", lw=1, alpha=0.8)
            looks = here.observed["z"][b].nonzero()[:, 0] + 1
            axis.plot(looks, track[looks], ".", color="k", ms=3)
        mean = here.returns.mean()
        axis.set(title=f"{name}: mean return {mean:.2f}", xlabel="time, steps", xlim=(0, episodes.horizon))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set(ylabel="position", ylim=(-15, 15))
    axes[0].plot([], [], color="#0072B2", label="ends in the reward")
    axes[0].plot([], [], color="#D55E00", label="ends elsewhere")
    axes[0].plot([], [], ".", color="k", label="observes")
    axes[0].legend(loc="lower left", framealpha=0.9)
    return figure


def main() -> None:
    """Simulate, print a table, and write the figure."""
    model = LightDark()
    model.check()
    episodes = simulate(model, look_then_go, 4000, contexts="balanced", seed=0)

    print("Light–Dark under 'two steps right, six looks, then commit'\n")
    print(f"{'context':<12} {'return':>8} {'s.e.':>6} {'right way':>10}")
    for c, name in enumerate(model.context_names):
        here = episodes[episodes.contexts == c]
        error = here.returns.std() / len(here) ** 0.5
        right_way = (here.rewards[:, -1] > 0).float().mean()
        print(f"{name:<12} {here.returns.mean():>8.2f} {error:>6.2f} {right_way:>10.1%}")

    path = Path("runs/simulate_light_dark.png")
    path.parent.mkdir(exist_ok=True)
    draw(model, episodes).savefig(path, dpi=120)
    print(f"\nfigure: {path}")


if __name__ == "__main__":
    main()
