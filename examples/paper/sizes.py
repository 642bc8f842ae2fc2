"""How much of everything a reproduction does."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Sizes:
    """How long learners learn, how hard planners think, and how many episodes all are judged by."""

    seeds: int  # fits with the information objective, for every variance ratio
    critic_seeds: int  # fits of the variational objective with a critic and belief rewards
    printed_seeds: int  # fits of the variational objective as the paper prints it
    rdpg_seeds: int  # fits of RDPG
    iterations: int  # of a fit with a critic
    printed_iterations: int  # of a fit without one
    batch_size: int  # episodes in an iteration
    rdpg_episodes: int  # that RDPG learns from
    curve_episodes: int  # that each point of RDPG's learning curve is measured on
    simulations: int  # for every decision of a planner
    planner_episodes: int  # that pomdp-py's planners are judged by
    pft_episodes: int  # that PFT-DPW is judged by, which plans in batches
    episodes: int  # that everybody else is judged by
    tuning_episodes: int  # that each candidate for "approach, observe, commit" is tried on
    trajectories: int  # episodes shown for each context
    grid_seeds: int  # fits on the line grid
    grid_iterations: int  # of each of them


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

QUICK = replace(
    FULL,
    seeds=2,
    critic_seeds=2,
    rdpg_seeds=2,
    iterations=160,
    printed_iterations=300,
    rdpg_episodes=2000,
    curve_episodes=500,
    simulations=50,
    planner_episodes=20,
    pft_episodes=40,
    episodes=1000,
    tuning_episodes=500,
    trajectories=4,
    grid_iterations=200,
)
