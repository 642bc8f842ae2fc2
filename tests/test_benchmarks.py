"""The page of benchmarks: made of what scripts print, a section at a time."""

from __future__ import annotations

import doctest
import re
import runpy
from pathlib import Path

import pytest

from benchmarks import page, scale
from benchmarks.__main__ import SCRIPTS, main, regenerate

ORDER = ("slow", "steady", "quick")


@pytest.fixture
def scripts(tmp_path):
    """A folder for scripts, and a way to write one that prints a table and ends with some exit code."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()

    def write(name: str, value: object, code: int = 0) -> None:
        table = f"| value |\n|---|\n| {value} |"
        (folder / f"{name}.py").write_text(
            f'"""Shows how {name} it is.\n\nMore of it.\n"""\n'
            f"import sys\nprint({table!r})\nprint('a warning', file=sys.stderr)\nsys.exit({code})\n"
        )

    for name in ORDER:
        write(name, 1)
    return folder, write


def test_a_page_has_a_section_for_each_script_in_order(scripts):
    folder, _ = scripts
    assert regenerate(["quick", "slow", "steady"], folder, ORDER) == []
    text = (folder / "README.md").read_text()
    assert list(page.sections(text)) == list(ORDER)
    section = page.sections(text)["steady"]
    assert section.startswith(
        "## Steady\n\nShows how steady it is.\n\n```\npython benchmarks/steady.py\n```\n"
    )
    assert section.endswith("\n\n| value |\n|---|\n| 1 |")
    assert "a warning" not in text
    assert "More of it" not in text


def test_only_what_is_asked_for_is_run(scripts):
    folder, write = scripts
    regenerate(ORDER, folder, ORDER)
    before = page.sections((folder / "README.md").read_text())
    for name in ORDER:
        write(name, 2)
    regenerate(["steady"], folder, ORDER)
    after = page.sections((folder / "README.md").read_text())
    assert "| 2 |" in after["steady"]
    assert "| 1 |" not in after["steady"]
    assert {**after, "steady": before["steady"]} == before


def test_a_script_that_fails_keeps_its_section_and_the_others_go_on(scripts, capfd):
    folder, write = scripts
    regenerate(ORDER, folder, ORDER)
    before = page.sections((folder / "README.md").read_text())
    write("slow", 2, code=3)
    write("quick", 2)
    assert regenerate(ORDER, folder, ORDER) == ["slow"]
    after = page.sections((folder / "README.md").read_text())
    assert after["slow"] == before["slow"]
    assert "| 2 |" in after["quick"]
    said = capfd.readouterr()
    assert "slow: failed with exit code 3; its section stays as it was" in said.err
    assert "| 2 |" in said.out


def test_a_script_that_never_ran_well_has_no_section(scripts):
    folder, write = scripts
    write("slow", 1, code=1)
    assert regenerate(["slow"], folder, ORDER) == ["slow"]
    assert not (folder / "README.md").exists()
    regenerate(["quick"], folder, ORDER)
    assert list(page.sections((folder / "README.md").read_text())) == ["quick"]


def test_a_script_that_prints_nothing_has_failed(scripts):
    folder, _ = scripts
    (folder / "slow.py").write_text('"""Says nothing."""\n')
    assert regenerate(["slow"], folder, ORDER) == ["slow"]


@pytest.mark.parametrize("head", ["", "def (:\n"])
def test_a_script_that_does_not_say_what_it_shows_is_not_run(scripts, capfd, head):
    folder, _ = scripts
    (folder / "slow.py").write_text(
        head + "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"
    )
    assert regenerate(ORDER, folder, ORDER) == ["slow"]
    assert not (folder / "ran").exists()
    assert "slow: " in capfd.readouterr().err
    assert list(page.sections((folder / "README.md").read_text())) == ["steady", "quick"]


@pytest.mark.parametrize(
    ("peak", "off", "verdict"),
    [
        (5000.0, 1.0, "peak memory"),
        (1.0, 9.0, "likelihoods"),
        (1.0, float("nan"), "likelihoods"),
        (1.0, 1.0, None),
    ],
)
def test_verdicts_on_scale_are_exit_codes(monkeypatch, capsys, peak, off, verdict):
    monkeypatch.setattr(scale, "growth", lambda *_: scale.Measured(1.0, 1.0, peak, 0.5))
    monkeypatch.setattr(scale, "engines", lambda *_: None)
    monkeypatch.setattr(scale, "million", lambda *_: off)
    monkeypatch.setattr(scale, "memory_of_simulate", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["scale.py"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if verdict is None:
        scale.main()
        return
    with pytest.raises(SystemExit) as ended:
        scale.main()
    assert str(ended.value.code).startswith(verdict)  # a text is exit code 1


def test_memory_is_compared_without_that_of_libraries(monkeypatch, capsys):
    """Of the work, twice as much: 100 and 200 MiB above the 300 of libraries."""
    sizes = []

    def measured(_, given, repeats, progress):
        sizes.extend(given)
        return [scale.Measured(1.0, 1.0, 400.0 if size == given[0] else 500.0, 300.0) for size in given]

    monkeypatch.setattr(scale, "in_turn", measured)
    scale.growth(scale.BASE, ("doubled",), 1, None)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| contexts")]
    assert rows[0].endswith("| 500 | 200 | 2.00 |")
    assert len(sizes) == 5


def test_engines_are_compared_in_processes_of_their_own(monkeypatch, capsys):
    """Of the eager one, five times the seconds, four times the processor's, and half as much memory again."""
    given = []

    def measured(work, sizes, repeats, progress):
        given.append((work.keywords["engine"], *sizes, repeats))
        eager = work.keywords["engine"] == "eager"
        return [scale.Measured(10.0, 8.0, 450.0, 200.0) if eager else scale.Measured(2.0, 2.0, 300.0, 200.0)]

    monkeypatch.setattr(scale, "in_turn", measured)
    scale.engines(scale.BASE, None)
    assert given == [("native", scale.BASE, 1), ("eager", scale.BASE, 1)]
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert rows[2] == "| native | 2.00 | 2.00 | 300 | 100 |"
    assert rows[4] == "| eager / native | 5.0 | 4.0 | 1.5 | |"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", "eager"])
def test_filtering_is_measured_by_the_engine_that_is_asked_for(monkeypatch, engine):
    asked = []
    run = scale.ParticleFilter.run

    def noted(self, *arguments, **options):
        asked.append(self.engine)
        return run(self, *arguments, **options)

    monkeypatch.setattr(scale.ParticleFilter, "run", noted)
    monkeypatch.setattr(scale.torch, "set_num_threads", lambda _: None)  # those of the other tests
    found = scale.filtered(scale.Size(2, 8, 3, 4), engine)
    assert asked == [engine, engine]
    assert found.peak >= found.libraries > 0


def test_the_page_is_written_after_each_script(scripts):
    folder, _ = scripts
    (folder / "quick.py").write_text(
        '"""Reads the page."""\nfrom pathlib import Path\n'
        "print('found', '## Slow' in Path(__file__).with_name('README.md').read_text())\n"
    )
    regenerate(["slow", "quick"], folder, ORDER)
    assert "found True" in (folder / "README.md").read_text()


def test_sections_of_scripts_that_are_no_more_go(scripts):
    folder, _ = scripts
    regenerate(ORDER, folder, ORDER)
    regenerate(["slow"], folder, ("slow", "quick"))
    assert list(page.sections((folder / "README.md").read_text())) == ["slow", "quick"]


def test_unknown_names_are_refused_before_anything_runs(monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.__main__.regenerate", lambda *_: pytest.fail("something ran"))
    with pytest.raises(SystemExit) as refused:
        main(["scale", "sclae"])
    assert refused.value.code == 2
    assert "'sclae'" in (said := capsys.readouterr().err)
    assert all(name in said for name in SCRIPTS)


@pytest.mark.parametrize(("names", "asked"), [([], SCRIPTS), (["fit"], ["fit"])])
@pytest.mark.parametrize("failed", [[], ["fit"]])
def test_failures_are_the_exit_code(monkeypatch, capsys, names, asked, failed):
    def run(given):
        assert list(given) == list(asked)
        return failed

    monkeypatch.setattr("benchmarks.__main__.regenerate", run)
    assert main(names) == len(failed)
    assert ("failed: fit" in capsys.readouterr().err) == bool(failed)


def test_every_script_can_have_a_section():
    folder = Path(page.__file__).parent
    for name in SCRIPTS:
        assert page.first_line(folder / f"{name}.py").endswith(".")
    apart = {"__init__", "__main__", "page", "light_dark_peers", "light_dark_fit_peer"}
    assert {path.stem for path in folder.glob("*.py")} - apart == set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_finds_what_it_imports(name, monkeypatch):
    folder = Path(page.__file__).parent
    monkeypatch.syspath_prepend(folder)  # as for a script
    try:
        runpy.run_path(str(folder / f"{name}.py"))
    except ModuleNotFoundError as missing:
        if missing.name not in ("numba", "jax", "particles"):  # extra `peers`
            raise


def test_the_machine_is_processor_cores_and_torch():
    assert re.fullmatch(r".+, \d+ cores?, torch \d\S+", page.machine())


def test_examples_of_docstrings():
    assert doctest.testmod(page).failed == 0
