"""`cpomdp check`: what is wrong with a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpomdp_ppl.cli.command import FAILED, OK, Command
from cpomdp_ppl.cli.model import ModelSpec
from cpomdp_ppl.cli.options import many, model_arguments
from cpomdp_ppl.errors import CompilerError, ModelError, UnsupportedModelError
from cpomdp_ppl.inference import ParticleFilter

if TYPE_CHECKING:
    from argparse import Namespace


def check(options: Namespace) -> int:
    """Say what is wrong with a model, if anything, and which engine runs it."""
    model = ModelSpec.of([options.model, *options.arguments]).build(check=False)
    try:
        model.check()
    except ModelError as error:
        print(error)
        return FAILED
    box = model.box
    actions = many(model.num_actions, "action") if box is None else f"actions of {many(box.dim, 'number')}"
    steps = f"{'at most ' if model.can_end else ''}{many(model.horizon, 'step')}"
    discounted = "" if model.discount == 1 else f", discount {model.discount:g}"
    print(
        f"{type(model).__name__}: no faults in {many(model.num_contexts, 'context')}, {actions}, "
        f"{steps}{discounted}"
    )
    try:
        ParticleFilter(engine="native").kernel(model)
        print("engine: native; the particle filter runs these programs compiled")
    except (CompilerError, UnsupportedModelError) as error:
        print(f"engine: eager; {error}")
    return OK


CHECK = Command(
    "Find out what is wrong with a model before anything long runs.",
    (
        "cpomdp check cpomdp_ppl.models:LightDark",
        "cpomdp check my_model.py:Maze walls='(3, 4)' horizon=30",
    ),
    model_arguments,
    check,
)
