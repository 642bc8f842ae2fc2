"""What README and documentation say in passing: numbers, names, files and commands are those of the code."""

from __future__ import annotations

import math
import re
import shlex
from importlib import import_module

import pytest

import cpomdp_command
from cpomdp_ppl.cli import COMMANDS
from cpomdp_ppl.cli.main import _parsers
from cpomdp_ppl.inference import GridFilter, ParticleFilter
from cpomdp_ppl.inference.choice import default_backend
from cpomdp_ppl.models import LightDark, LineGrid
from solvers import regret
from solvers.cids.experience import SHARD
from solvers.cids.settings import FitSettings
from tests import ROOT
from tests.solvers.machines import Machine

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]
TEXTS = {page: (ROOT / page).read_text() for page in PAGES}


def said(page: str, pattern: str) -> list[float]:
    """The numbers in a sentence of a page, wherever its lines break."""
    found = re.search(pattern, " ".join(TEXTS[page].split()))
    assert found is not None, f"{page} no longer says {pattern!r}: mend this test, or the page"
    return [float(number.replace(",", "")) for number in found.groups()]


def everywhere(pattern: str) -> list[str]:
    """What a pattern finds in all pages, each once."""
    return sorted({found for text in TEXTS.values() for found in re.findall(pattern, text)})


def defaults(**given: object) -> FitSettings:
    names = ("likelihood", "policy", "estimator", "prior", "temperature", "learning_rate", "iterations")
    return FitSettings.of(LineGrid(), objective="information", batch_size=2, **dict.fromkeys(names), **given)


def test_what_a_fit_does_unless_it_is_told_otherwise():
    assert said("README.md", r"at most ([\d,]+) if left out") == [defaults().iterations]
    start, end = said("docs/solving.md", r"it falls from ([\d.]+) % to ([\d.]+) % of what a nat may be worth")
    nat = math.log(2) / 20.0  # who is told where the detector is earns 20 more
    by_default = [100 * nat * defaults().temperature(when) for when in (0.0, 1.0)]
    assert by_default == pytest.approx([start, end], rel=0.01)


def test_which_models_are_fitted_exactly():
    (most,) = said("docs/models.md", r"`fit` uses them for up to (\d+) states")
    names = [default_backend(Machine(0, N=int(most) + more)).name for more in (0, 1)]
    assert names == ["exact", "smc"]


def test_how_batches_are_shared_out():
    (most,) = said("docs/solving.md", r"in shards of at most (\d+)")
    assert most == SHARD


def test_how_often_a_lost_episode_is_tried_again():
    (most,) = said("docs/inference.md", r"with eight times as many particles, up to ([\d,]+)")
    numbers, backend = [], ParticleFilter(64)
    while backend is not None:
        numbers.append(backend.num_particles)
        backend = backend.larger()
    assert numbers == [64, 512, 4096, most]


def test_how_exact_a_grid_is():
    (tolerance,) = said("docs/inference.md", r"within a tolerance of ([\d.]+) nats")
    assert tolerance == GridFilter().tolerance


def test_the_constant_of_the_theorem():
    (xi,) = said("docs/paper.md", r"with ξ = ([\d.]+)")
    assert regret.smallest_xi() == pytest.approx(xi, abs=5e-5)


def test_the_default_of_light_dark():
    """The paper's sensors: 8 to 1, which the figures vary."""
    assert (LightDark().dark_variance, LightDark().light_variance) == (8.0, 1.0)


@pytest.mark.parametrize(
    "name", everywhere(r"\b((?:cpomdp_ppl|solvers|baselines)(?:\.(?!md\b|py\b)[a-zA-Z_]\w*)+)")
)
def test_names_lead_to_something(name):
    parts = name.split(".")
    for k in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:k]))
        except ModuleNotFoundError as error:
            if not name.startswith(error.name or "?"):
                pytest.skip(f"{error.name} is not installed")
            continue
        for attribute in parts[k:]:
            found = getattr(found, attribute)
        return


@pytest.mark.parametrize(
    "path",
    everywhere(
        r"[` (]((?:examples|solvers|cpomdp_ppl|baselines|benchmarks|tests|docs)/(?!models/your_)[\w/]+\.\w+)"
    ),
)
def test_files_are_there(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize("path", re.findall(r"`([\w/]+\.py|\w+/)`", TEXTS["docs/concepts.md"]))
def test_files_of_the_concepts_are_there(path):
    """Many are named within their package, as `policy.py`."""
    assert any(
        (ROOT / package / path).exists()
        for package in ("", "cpomdp_ppl", "cpomdp_ppl/inference", "solvers/cids")
    )


@pytest.mark.parametrize("target", everywhere(r"(?m)(?:^|`)make ([a-z]+)"))
def test_targets_are_in_the_makefile(target):
    assert re.search(rf"(?m)^{target}:", (ROOT / "Makefile").read_text())


@pytest.mark.parametrize("line", everywhere(r"(?m)^(?:.*-m cpomdp_ppl|cpomdp) ([a-z]+ [^#\n]*)"))
def test_commands_can_be_given_like_that(line):
    cpomdp_command.main(["help"])  # which gathers the commands of all packages
    name, *words = shlex.split(line)
    assert name in COMMANDS.names()
    _parsers([name])[1][name].parse_intermixed_args(words)
