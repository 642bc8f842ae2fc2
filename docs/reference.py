"""Write docs/reference.md: every attribute and method of what a user meets, out of the docstrings.

`python docs/reference.py` writes the page anew; a test says when that is due.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING

from cpomdp_ppl import CPOMDP, Agent, Episodes, History
from cpomdp_ppl.evaluation import Comparison, Evaluation, Mean
from cpomdp_ppl.inference import Filtering, OnlineFilter, Smoothing
from cpomdp_ppl.policy import Percept, Policy
from solvers.cids.solution import Solution

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).with_suffix(".md")
CLASSES = {
    "Writing a model": [CPOMDP],
    "Acting": [Policy, History, Percept, Agent],
    "What happened": [Episodes],
    "What is believed": [Filtering, Smoothing, OnlineFilter],
    "What a policy is worth": [Evaluation, Mean, Comparison, Solution],
}


def page() -> str:
    """The page as Markdown."""
    lines = [
        "# Reference",
        "",
        "Every attribute and method of what a user meets, written by `python docs/reference.py`.",
        "Shapes are in brackets: B episodes, T steps, C contexts, N particles.",
    ]
    for heading, classes in CLASSES.items():
        lines += ["", f"## {heading}"]
        for each in classes:
            lines += ["", f"### `{each.__module__}.{each.__name__}`", "", _prose(each)]
            rows = [*_attributes(each), *_methods(each)]
            lines += ["", "| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)]
    return "\n".join(lines) + "\n"


def _prose(thing: object) -> str:
    """What a docstring says before it lists anything."""
    return re.split(r"\n\s*(?:Attributes|Args|Example|Raises|Returns):\n", inspect.getdoc(thing) or "")[
        0
    ].strip()


def _attributes(cls: type) -> Iterator[tuple[str, str]]:
    listed = re.search(r"\nAttributes:\n(.*?)(?=\n\S|\Z)", inspect.getdoc(cls) or "", re.DOTALL)
    for name, text in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", listed[1] if listed else "", re.MULTILINE):
        yield f"`{name}`", _cell(text)


def _methods(cls: type) -> Iterator[tuple[str, str]]:
    for name, member in vars(cls).items():
        if name.startswith("_"):
            continue
        function = getattr(member, "__func__", member)
        text = _cell(_prose(member))
        if isinstance(member, property):
            yield f"`{name}`", text
        elif inspect.isfunction(function):
            given = [str(p).split(":")[0].split("=")[0].strip() for p in _parameters(function)]
            yield f"`{name}({', '.join(given)})`", text


def _parameters(function: object) -> list[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [parameter for parameter in parameters if parameter.name != "self"]


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
