"""`cpomdp simulate`: episodes in a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpomdp_ppl.cli.command import OK, Command
from cpomdp_ppl.cli.options import FRESH, many, note, target_options
from cpomdp_ppl.cli.target import CommandTarget
from cpomdp_ppl.evaluation import Mean
from cpomdp_ppl.rollout import simulate as play

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

EPISODES, RETURNS = "episodes.npz", "returns.csv"


def simulate(options: Namespace) -> int:
    """Play episodes, and keep them."""
    target = CommandTarget.of(options)
    settings = {"num_episodes": options.num_episodes, "contexts": options.contexts}
    results = target.results(options, "simulate", settings, (EPISODES, RETURNS))
    with results.kept():
        episodes = play(
            target.model,
            target.policy(options),
            options.num_episodes,
            contexts=options.contexts,
            prior=target.prior,
            seed=results.seed,
        )
        assert episodes.contexts is not None
        assert episodes.returns is not None
        means = {
            name: Mean.of(episodes.returns[episodes.contexts == c])
            for c, name in enumerate(target.model.context_names)
            if bool((episodes.contexts == c).any())
        }
        folder = results.replace()
        folder.write(EPISODES, episodes.save)
        folder.write_table(
            RETURNS,
            {
                "context": list(means),
                "episodes": [mean.num_episodes for mean in means.values()],
                "return": [mean.mean for mean in means.values()],
                "standard_error": [mean.standard_error for mean in means.values()],
            },
        )
        results.finish(**target.in_force, contexts="drawn from the prior")
    width = max(map(len, means))
    for name, mean in means.items():
        print(f"{name:<{width}}  {many(mean.num_episodes, 'episode'):>17}  return {mean}")
    note(options, f"episodes: {results.folder.path / EPISODES} (read by cpomdp_ppl.Episodes.load)")
    return OK


def _options(parser: ArgumentParser) -> None:
    target_options(parser, num_episodes=1000, seed=FRESH)
    parser.add_argument(
        "--contexts", metavar="NAME", help="the true context, or 'balanced' (default: drawn from the prior)"
    )


SIMULATE = Command(
    "Play episodes of a model, with a policy by name or that of a fit, and keep them.",
    (
        "cpomdp simulate cpomdp_ppl.models:LightDark --policy random --num-episodes 10000 --seed 0",
        "cpomdp simulate my_model.py:Maze horizon=30 --policy qmdp --contexts balanced --run runs/maze",
        "cpomdp simulate runs/LightDark-fit-1 --contexts 'light left'",
    ),
    _options,
    simulate,
)
