"""The code in README and documentation runs, top to bottom, as a reader would paste it."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]
READING = [
    ["README.md"],
    ["docs/models.md", "docs/solving.md", "docs/baselines.md"],
    ["docs/models.md", "docs/inference.md"],
]
"""Pages that build on one another, in the order in which they are read."""


@pytest.mark.slow
@pytest.mark.parametrize("pages", READING, ids=lambda pages: pages[-1])
def test_its_code_runs(pages, capsys, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "readme"}
    for page in pages:
        for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL):
            exec(compile(block, page, "exec"), names)
    assert "Episodes(B=10000" in capsys.readouterr().out


def test_no_page_is_left_out():
    with_code = {page for page in PAGES if "```python" in (ROOT / page).read_text()}
    assert with_code == {page for pages in READING for page in pages}


def test_a_complete_model_fits_in_forty_lines():
    first = re.search(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert first is not None
    assert len(first.group(1).splitlines()) < 40


@pytest.mark.parametrize("page", PAGES)
def test_its_pictures_and_links_lead_somewhere(page):
    for path in re.findall(r"\]\((?!http)(.*?)\)", (ROOT / page).read_text()):
        assert (ROOT / page).parent.joinpath(path).exists(), path


def listed():
    """What the reference lists, and what the modules among that export."""
    for name in re.findall(r"^::: (\S+)$", (ROOT / "docs" / "reference.md").read_text(), flags=re.MULTILINE):
        found = pkgutil.resolve_name(name)
        yield found
        yield from (getattr(found, inner) for inner in getattr(found, "__all__", ()))


def test_the_reference_lists_what_pages_import():
    known = {id(each) for each in listed()}
    for page in PAGES:
        for module, names in re.findall(
            r"^from ((?:cpomdp_ppl|solvers|baselines)[\w.]*) import (.+)$",
            (ROOT / page).read_text(),
            re.MULTILINE,
        ):
            for name in re.split(", ", names):
                found = pkgutil.resolve_name(f"{module}:{name.split(' as ')[0]}")
                assert id(found) in known, f"{page}: {module}.{name}"
