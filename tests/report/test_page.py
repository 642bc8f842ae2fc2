from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser

import pytest
from matplotlib.figure import Figure

from cpomdp_ppl import RandomPolicy, evaluate
from cpomdp_ppl.experiments.run_folder import RunFolder, RunFolderError
from cpomdp_ppl.models import ContextualTiger, LightDark, LineGrid
from cpomdp_ppl.report import page, write_report

EVIL = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>@@TITLE@@"


class Parsed(HTMLParser):
    """The scripts of a page, as a browser would find them, and what else is outside."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.tags: list[str] = []
        self.title = ""
        self._inside: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._inside = tag
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        if self._inside == "title":
            self.title += data

    @property
    def data(self):
        (text,) = [text for attributes, text in self.scripts if attributes.get("type") == "application/json"]

        return json.loads(text, parse_constant=pytest.fail)


def new_run(path, **further) -> RunFolder:
    settings = {"model": "cpomdp_ppl.models:LineGrid", "settings": {"iterations": 3}, "seed": 7, **further}
    return RunFolder.create(path, "fit", **settings)


def written(path, **settings) -> Parsed:
    file = write_report(path, **{"model": LineGrid(), "likelihood": "exact", "num_episodes": 2, **settings})
    return Parsed(file.read_text(encoding="utf-8"))


HISTORY = {
    "iteration": [1, 2, 3],
    "return": [-3.0, 0.5, 4.0],
    "entropy": [0.9, "nan", 0.4],
    "loss": [1, 2, 3],
}


CALIBRATION = {
    "likelihood": "smc",
    "calibrated": False,
    "verdict": "not calibrated: contexts (over-confident)",
    "p_values": {"contexts": 0.002, "observations: z": None},
    "num_episodes": {"contexts": 40, "observations: z": 0},
    "hints": {"contexts": "over-confident", "observations: z": "never seen"},
    "brier": 0.31,
    "expected_brier": 0.2,
    "ece": None,
}

# Two runs; the second is settled after its first episode.
LIVED = {
    "run": [0, 0, 1, 1],
    "true_context": ["a", "a", "b", "b"],
    "episode": [1, 2, 1, 2],
    "played": [True, True, True, False],
    "return": [1.0, 5.0, 3.0, None],
    "entropy_nats": [math.log(2), 0.0, math.log(2) / 2, math.log(2) / 2],
    "regret": [4.0, 0.0, 2.0, None],
    "P(a)": [0.5, 1.0, 0.25, 0.25],
    "P(b)": [0.5, 0.0, 0.75, 0.75],
}


def draw(folder, *names):
    figure = Figure()
    figure.subplots().plot([0, 1])
    for name in names:
        folder.write_figure(name, figure)


@pytest.fixture
def full(tmp_path):
    """A folder with everything in it."""
    folder = new_run(tmp_path / "run", arguments={"accuracy": 0.9})
    folder.write_json("evaluation.json", evaluate(LineGrid(), RandomPolicy(3), 50, seed=0).as_dict())
    folder.write_table("comparison.csv", {"policy": ["random", "cids"], "return": [-1.5, 12.25]})
    folder.write_table("history.csv", HISTORY)
    folder.write_table(
        "rhat.csv",
        {"quantity": ["a", "b", "c"], "hdi_3%": [0, 0, 0], "sd": [1, 2, 3], "r_hat": [1.001, 1.2, None]},
    )
    folder.write_json("calibration.json", CALIBRATION)
    folder.write_table("algorithm_1.csv", LIVED)
    draw(folder, "contexts")
    folder.add("evaluate", settings={"num_episodes": 50}, seed=0)
    folder.finish()
    return folder


@pytest.mark.slow
def test_everything_is_on_the_page(full, tmp_path):
    data = written(full.path, policy=RandomPolicy(3), policy_name="qmdp", output=tmp_path / "page.html").data
    assert not (full.path / "report.html").exists()
    assert data["played_by"] == "qmdp"
    assert data["title"] == "LineGrid"
    assert data["lead"].startswith("A robot in a row of cells")
    assert "unfinished" not in data
    evaluation = json.loads((full.path / "evaluation.json").read_text())
    numbers = {each["name"]: each["value"] for each in data["headline"]["numbers"]}
    assert numbers["Return"] == f"{evaluation['returns']['mean']:.2f}"
    assert numbers["Regret"] == f"{evaluation['regret']['mean']:.2f}"
    by_context, comparison = data["headline"]["tables"]
    assert [row[0] for row in by_context["rows"]] == ["detector right", "detector left"]
    assert comparison["columns"] == ["policy", "return"]
    assert comparison["rows"] == [["random", -1.5], ["cids", 12.25]]
    returns, entropy = data["convergence"]["series"]
    assert data["convergence"]["iteration"] == [1, 2, 3]
    assert returns["values"] == [-3.0, 0.5, 4.0]
    assert returns["reference"] == 20.0  # the high-value target, for who is told where it is
    assert entropy["values"] == [0.9, None, 0.4]
    assert data["diagnostics"]["rhat"]["rows"] == [["b", 2, 1.2], ["a", 1, 1.001]]
    assert "1.200 at most; 1 of 2 are" in data["diagnostics"]["rhat"]["sentence"]
    (figure,) = data["pictures"]["diagnostics"]["shown"]
    kind, encoded = re.fullmatch(r"data:image/(svg\+xml|png);base64,(.*)", figure["source"]).groups()
    suffix = {"svg+xml": "svg", "png": "png"}[kind]
    assert base64.b64decode(encoded) == (full.path / "figures" / f"contexts.{suffix}").read_bytes()
    rows = {part["title"]: dict(part["rows"]) for part in data["configuration"]}
    assert rows["Run"]["seed"] == "7"
    assert rows["Model"] == {"accuracy": "0.9"}
    assert rows["Settings"] == {"iterations": "3"}
    assert rows["Added by evaluate"] == {"num_episodes": "50", "seed": "0"}
    assert rows["Versions"]["python"] == full.record["versions"]["python"]
    assert data["player"]["horizon"] == 10


PARTS = {
    "evaluation.json": "numbers",
    "comparison.csv": "comparison",
    "history.csv": "convergence",
    "rhat.csv": "rhat",
    "calibration.json": "calibration",
    "algorithm_1.csv": "algorithm1",
    "figures/contexts.svg": "figures",
}


@pytest.mark.parametrize("missing", PARTS)
def test_what_is_missing_is_left_out(full, missing):
    (full.path / missing).unlink()
    if missing.startswith("figures"):
        (full.path / "figures" / "contexts.png").unlink()
    data = written(full.path).data
    there = {
        "numbers": "numbers" in data["headline"],
        "comparison": any("policy" in table["columns"] for table in data["headline"]["tables"]),
        "convergence": "convergence" in data,
        "rhat": data["diagnostics"]["rhat"] is not None,
        "calibration": data["diagnostics"]["calibration"] is not None,
        "algorithm1": "algorithm1" in data,
        "figures": bool(data["pictures"]),
    }
    assert there == {name: name != PARTS[missing] for name in PARTS.values()}


def test_an_empty_run_has_its_configuration_alone(tmp_path):
    new_run(tmp_path / "run")
    assert "not finished" in written(tmp_path / "run").data["unfinished"]
    RunFolder.open(tmp_path / "run", unfinished=True).finish()
    data = written(tmp_path / "run").data
    assert not {"headline", "player", "algorithm1", "convergence", "diagnostics"} & set(data)
    assert data["pictures"] == {}
    assert [part["title"] for part in data["configuration"]] == ["Run", "Settings", "Versions"]


def test_names_cannot_break_out(full):
    """Whatever names, settings and tables hold, there are two scripts, and data come back as they were."""

    class Evil(LineGrid):
        contexts = (EVIL, "plain")
        actions = (EVIL, "right", "sense")

    Evil.__name__ = Evil.__doc__ = EVIL
    full.write_table("comparison.csv", {EVIL: [EVIL, "b"], "return": [1.0, 2.0]})
    full.add(EVIL, settings={EVIL: EVIL}, seed=0)
    plain = written(full.path, policy=RandomPolicy(3))
    evil = written(full.path, model=Evil(), policy=RandomPolicy(3))
    assert evil.tags == plain.tags
    assert [attributes.get("type") for attributes, _ in evil.scripts] == ["application/json", None]
    assert evil.scripts[1] == plain.scripts[1]
    assert evil.title == EVIL
    data = evil.data
    assert data["title"] == EVIL
    assert data["player"]["contexts"] == [EVIL, "plain"]
    assert data["player"]["actions"][0] == EVIL
    assert data["headline"]["tables"][1]["columns"][0] == EVIL
    assert any(part["title"] == f"Added by {EVIL}" for part in data["configuration"])


def test_only_its_own_script_may_run_and_nothing_be_loaded(full):
    text = write_report(full.path, model=LineGrid()).read_text(encoding="utf-8")
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    (_, script), *_ = [each for each in Parsed(text).scripts if not each[0]]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert rules["script-src"] == f"'sha256-{digest}'"
    outside = re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.DOTALL)
    # The name of a language, which nobody looks up.
    assert set(re.findall(r"https?://[^\"'\s<]+", outside)) == {"http://www.w3.org/2000/svg"}


@pytest.mark.slow
def test_size_of_a_page(tmp_path):
    """Twelve episodes of Light–Dark with 200 particles fit well."""
    new_run(tmp_path / "run").finish()
    file = write_report(tmp_path / "run", model=LightDark(), policy=RandomPolicy(3))
    assert file.stat().st_size < 5_000_000
    player = Parsed(file.read_text(encoding="utf-8")).data["player"]
    assert len(player["posterior"]) == 12
    assert player["parts"][0]["cloud"]["shape"] == [12, 21, 2, 200, 1]


def test_a_page_that_would_be_too_large(full, monkeypatch):
    """Episodes are left out first, then figures, which are named."""
    settings = dict(policy=RandomPolicy(3), num_episodes=8)
    assert len(written(full.path, **settings).data["player"]["action"]) == 8
    module = write_report.__globals__
    alone = write_report(full.path, model=LineGrid()).read_text(encoding="utf-8")
    (figure,) = Parsed(alone).data["pictures"]["diagnostics"]["shown"]
    largest = len(alone) - len(figure["source"]) + 8_000
    monkeypatch.setitem(module, "FIGURE_CHARACTERS", 0)
    monkeypatch.setitem(module, "MAX_CHARACTERS", largest)
    file = write_report(full.path, model=LineGrid(), likelihood="exact", **settings)
    text = file.read_text(encoding="utf-8")
    assert len(text) <= largest
    data = Parsed(text).data
    assert 1 <= len(data["player"]["action"]) < 8
    assert data["pictures"]["diagnostics"]["shown"] == []
    assert data["pictures"]["diagnostics"]["left_out"][0].startswith("figures/contexts.")


def test_regret_that_is_not_known_is_bounded(full):
    found = evaluate(ContextualTiger(), RandomPolicy(3), 30, seed=0)
    full.write_json("evaluation.json", found.as_dict())
    numbers = {each["name"]: each for each in written(full.path).data["headline"]["numbers"]}
    assert "Regret" not in numbers
    assert numbers["Regret, at most"]["value"] == f"{100 - found.returns.mean:.2f}"
    assert "behind 100.00, the most that knowing all of" in numbers["Regret, at most"]["more"]


def test_regret_says_what_it_is_against(full):
    found = evaluate(ContextualTiger(), RandomPolicy(3), 30, reference=RandomPolicy(3), seed=0).as_dict()
    full.write_json("evaluation.json", found)
    numbers = {each["name"]: each for each in written(full.path).data["headline"]["numbers"]}
    assert numbers["Regret"]["more"].endswith("behind RandomPolicy, told the context")
    assert "Regret, at most" in numbers
    del found["regret_against"], found["informed_return"]  # as in earlier versions
    full.write_json("evaluation.json", found)
    numbers = {each["name"]: each for each in written(full.path).data["headline"]["numbers"]}
    assert numbers["Regret"]["more"].endswith("behind an agent that is told the context")


def test_an_evaluation_of_one_episode_has_no_errors(full):
    """A single episode has no standard error, which is no damage."""
    full.write_json("evaluation.json", evaluate(LineGrid(), RandomPolicy(3), 1, seed=0).as_dict())
    assert json.loads((full.path / "evaluation.json").read_text())["returns"]["standard_error"] is None
    numbers = {each["name"]: each["more"] for each in written(full.path).data["headline"]["numbers"]}
    assert numbers["Return"] == "± – (standard error), 1 episode"
    assert numbers["Regret"].startswith("± – ")


def test_calibration_in_words(full):
    found = written(full.path).data["diagnostics"]["calibration"]
    assert found["sentence"] == (
        "The filter “smc” is not calibrated: contexts (over-confident)."
        " Brier score of contexts 0.3100, expected 0.2000; calibration error –."
    )
    assert found["rows"] == [
        ["contexts", 40, 0.002, "over-confident"],
        ["observations: z", 0, None, "never seen"],
    ]
    assert found["calibrated"] is False


def test_algorithm_1_by_episode(full):
    """Returns and regret are means over runs that played, beliefs over all."""
    found = written(full.path).data["algorithm1"]
    assert found["columns"] == [
        "Episode", "Runs", "Return", "Standard error", "Regret", "H(C|history), bits", "P(true context)",
    ]  # fmt: skip
    # Returns 1 and 3 have a deviation of √2, over two runs: an error of 1.
    assert found["rows"] == [[1, 2, 2.0, 1.0, 3.0, 0.75, 0.625], [2, 1, 5.0, None, 0.0, 0.25, 0.875]]
    assert found["sentence"] == (
        "After 2 episodes, 0.250 bits are open on average, and the true context is held 87.5 % likely."
    )
    sure = {**LIVED, "P(a)": [0.5, 0.99999, 0.0, 0.0], "P(b)": [0.5, 0.0, 1.0, 1.0]}
    full.write_table("algorithm_1.csv", sure)
    assert written(full.path).data["algorithm1"]["sentence"].endswith("held more than 99.9 % likely.")
    full.write_table("algorithm_1.csv", {**sure, "context_known_standard_error": [0.1, 0.1, 0.0, None]})
    sentence = written(full.path).data["algorithm1"]["sentence"]
    assert sentence.startswith("Regret is against the same policy, told the context. After 2 episodes")
    unknown = {**LIVED, "true_context": [None] * 4}
    full.write_table("algorithm_1.csv", {name: unknown[name] for name in unknown if name != "regret"})
    found = written(full.path).data["algorithm1"]
    assert found["columns"] == ["Episode", "Runs", "Return", "Standard error", "H(C|history), bits"]
    assert found["sentence"] == "After 2 episodes, 0.250 bits are open on average."


@pytest.mark.slow
def test_many_episodes_of_algorithm_1_are_thinned(full):
    n = 101
    once = {name: [column[0]] * n for name, column in LIVED.items()}
    full.write_table("algorithm_1.csv", {**once, "episode": range(1, n + 1)})
    found = written(full.path).data["algorithm1"]
    episodes = [row[0] for row in found["rows"]]
    assert len(episodes) == 20
    assert (episodes[0], episodes[-1]) == (1, n)
    assert found["sentence"].endswith(" 20 of the episodes:")


@pytest.mark.slow
def test_figures_are_where_they_belong(full):
    """What a solution's figure shows is on the page already, if there are a history and episodes."""
    draw(full, "solution", "algorithm_1", "mine")

    def names(**settings):
        shown = written(full.path, **settings).data["pictures"]
        return {place: [figure["name"] for figure in found["shown"]] for place, found in shown.items()}

    elsewhere = {"diagnostics": ["contexts"], "algorithm1": ["algorithm_1"], "others": ["mine"]}
    assert names(policy=RandomPolicy(3)) == elsewhere
    assert names() == {**elsewhere, "convergence": ["solution"]}
    (figure,) = written(full.path).data["pictures"]["algorithm1"]["shown"]
    assert "two standard errors" in figure["note"]


def test_long_histories_are_thinned_to_means(full):
    n = 1200
    full.write_table("history.csv", {"iteration": range(1, n + 1), "return": [k % 3 for k in range(n)]})
    curves = written(full.path).data["convergence"]
    assert curves["batches_per_point"] == 3
    assert len(curves["iteration"]) == 400
    assert curves["iteration"][:2] == [2, 5]
    assert set(curves["series"][0]["values"]) == {1.0}


DAMAGE = {
    "evaluation.json": '{"returns": 3}',
    "calibration.json": '{"verdict": 3}',
    "algorithm_1.csv": "episode\n1\n",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_named(full, name):
    (full.path / name).write_text(DAMAGE[name])
    with pytest.raises(RunFolderError, match=f"{re.escape(name)} is damaged"):
        write_report(full.path, model=LineGrid())


def test_values_are_put_in_once():
    """What is put in is not searched for places to put something in."""
    text = page.page({"title": "@@DATA@@", "x": "@@SCRIPT_HASH@@"})
    assert "<title>@@DATA@@</title>" in text
    assert Parsed(text).data == {"title": "@@DATA@@", "x": "@@SCRIPT_HASH@@"}
