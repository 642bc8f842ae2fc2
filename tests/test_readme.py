"""The README's code runs, top to bottom, as a reader would paste it."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_readme_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert blocks
    names: dict[str, object] = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert "Episodes(B=10000" in capsys.readouterr().out


def test_a_complete_model_fits_in_forty_lines():
    first = re.search(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert first is not None
    assert len(first.group(1).splitlines()) < 40


def test_its_pictures_are_there():
    for path in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (Path(__file__).parent.parent / path).exists()
