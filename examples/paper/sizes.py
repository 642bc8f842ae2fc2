"""How much of everything a reproduction does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """How long learners learn, how hard planners think, and how many episodes all are judged by.

    Attributes:
        seeds: Fits with the information objective, for every variance ratio.
        critic_seeds: Fits of the variational objective with a critic and belief rewards.
        printed_seeds: Fits of the variational objective as the paper prints it.
        rdpg_seeds: Fits of RDPG.
        iterations: Of a fit with a critic.
        printed_iterations: Of a fit without one.
        batch_size: Episodes in an iteration.
        rdpg_episodes: Episodes that RDPG learns from.
        curve_episodes: Episodes that each point of RDPG's learning curve is measured on.
        simulations: For every decision of a planner.
        planner_episodes: Episodes that pomdp-py's planners are judged by.
        pft_episodes: Episodes that PFT-DPW is judged by, which plans in batches.
        episodes: Episodes that everybody else is judged by.
        tuning_episodes: Episodes that each candidate for "approach, observe, commit" is tried on.
        trajectories: Episodes shown for each context.
        grid_seeds: Fits on the line grid.
        grid_iterations: Of each.
    """

    seeds: int
    critic_seeds: int
    printed_seeds: int
    rdpg_seeds: int
    iterations: int
    printed_iterations: int
    batch_size: int
    rdpg_episodes: int
    curve_episodes: int
    simulations: int
    planner_episodes: int
    pft_episodes: int
    episodes: int
    tuning_episodes: int
    trajectories: int
    grid_seeds: int
    grid_iterations: int


FULL = Sizes(
    seeds=5,
    critic_seeds=3,
    printed_seeds=2,
    rdpg_seeds=3,
    iterations=800,
    printed_iterations=4000,
    batch_size=200,
    rdpg_episodes=10_000,
    curve_episodes=1000,
    simulations=500,
    planner_episodes=100,
    pft_episodes=400,
    episodes=4000,
    tuning_episodes=2000,
    trajectories=8,
    grid_seeds=2,
    grid_iterations=800,
)

QUICK = Sizes(
    seeds=2,
    critic_seeds=2,
    printed_seeds=2,
    rdpg_seeds=2,
    iterations=160,
    printed_iterations=300,
    batch_size=200,
    rdpg_episodes=2000,
    curve_episodes=500,
    simulations=50,
    planner_episodes=20,
    pft_episodes=40,
    episodes=1000,
    tuning_episodes=500,
    trajectories=4,
    grid_seeds=2,
    grid_iterations=200,
)
