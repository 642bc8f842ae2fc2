"""The report in a real browser: it draws itself without complaint, and its controls do what they say."""

from __future__ import annotations

import os

import pyro.distributions as dist
import pytest
import torch
from matplotlib.figure import Figure

from cpomdp_ppl import RandomPolicy, evaluate
from cpomdp_ppl.experiments.run_folder import RunFolder
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark, LineGrid
from cpomdp_ppl.report import write_report
from tests.browser.chromium import Chromium, find_chromium
from tests.cli.conftest import data_of
from tests.programs import Sail

EVIL = "</script><script>document.title = 'broken'</script><img src=x onerror=\"document.title = 'broken'\">"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    path = find_chromium()
    if path is None:
        missing = "no Chromium found: install chromium, or set CHROMIUM to the path of one"
        if os.environ.get("REQUIRE_CHROMIUM"):  # where a skip would pass unnoticed
            pytest.fail(missing)
        pytest.skip(missing)
    with Chromium(path, tmp_path_factory.mktemp("profile")) as chromium:
        yield chromium


@pytest.fixture
def browser(chromium):
    """The browser, which must have no complaints at the end."""
    chromium.complaints.clear()
    yield chromium
    assert chromium.complaints == []


LONG = "WWWW measure the magnetometer’s offset again and then wait for the other one"


def report(path, model, policy=None, *, results=True, **settings):
    """A page about a run with results and a history."""
    folder = RunFolder.create(path, "fit", model=f"cpomdp_ppl.models:{type(model).__name__}", seed=1)
    if results:
        folder.write_json("evaluation.json", evaluate(model, RandomPolicy(model.num_actions), 20).as_dict())
        steps = range(1, 41)
        columns = {"return": [k / 10 for k in steps], "temperature": [3 / k for k in steps]}
        folder.write_table("history.csv", {"iteration": steps, **columns})
        folder.write_table(
            "rhat.csv", {"quantity": ["a", "b"], "ess_bulk": [401.25, 7.0], "r_hat": [1.0, 1.5]}
        )
    folder.finish()
    return write_report(path, model=model, policy=policy, num_episodes=4, num_particles=40, **settings)


@pytest.fixture(scope="module")
def light_dark(tmp_path_factory):
    def look_then_go(history):
        p = torch.tensor([0.1, 0.2, 0.7] if history.time < 8 else [0.05, 0.9, 0.05])
        return dist.Categorical(probs=p.expand(history.num_episodes, 3))

    place = tmp_path_factory.mktemp("reports") / "light dark"
    return report(place, LightDark(), look_then_go, policy_name="look, then go", seed=2)


@pytest.fixture
def page(browser, light_dark):
    """Light–Dark's page, just opened."""
    browser.requests.clear()
    browser.open(light_dark)
    return browser


def sections(browser):
    return browser.evaluate("[...document.querySelectorAll('main > section')].map((each) => each.id)")


def texts(browser, selector):
    return browser.evaluate(f"[...document.querySelectorAll('{selector}')].map((each) => each.textContent)")


def text(browser, selector):
    return browser.evaluate(f"document.querySelector('{selector}').textContent")


def picture(browser):
    return browser.evaluate("document.querySelector('#picture').innerHTML")


def clock(browser):
    words = text(browser, "#clock").split()  # t = 3 of 20
    assert int(words[2]) == int(browser.evaluate("document.querySelector('#time').value"))
    return int(words[2])


def test_it_draws_everything_and_loads_nothing(page, light_dark, tmp_path):
    assert sections(page) == ["headline", "player", "convergence", "diagnostics", "configuration"]
    cells = texts(page, "#diagnostics td")
    assert cells == ["b", "7", "1.500", "a", "401", "1.000"]
    assert page.requests == [light_dark.absolute().as_uri()]
    assert text(page, "h1") == "LightDark"
    assert text(page, "#player h2") == "Episodes played by look, then go"
    assert page.evaluate("document.querySelectorAll('#convergence svg path').length") >= 2
    shot = tmp_path / "report.png"
    page.screenshot(shot)
    assert shot.read_bytes().startswith(b"\x89PNG")
    assert shot.stat().st_size > 20_000


def test_buttons(page):
    assert clock(page) == 0
    assert page.evaluate("document.querySelector('#back').disabled")
    before = picture(page)
    page.click("#forward")
    assert clock(page) == 1
    assert picture(page) != before
    page.click("#forward")
    assert clock(page) == 2
    page.click("#back")
    assert clock(page) == 1
    page.click("#last")
    assert clock(page) == 20
    assert page.evaluate("document.querySelector('#forward').disabled")
    assert page.evaluate("document.querySelector('#decision').hidden")  # nothing is left to decide
    assert "over, with a return of" in text(page, "#said")
    page.click("#first")
    assert clock(page) == 0
    assert picture(page) == before


def test_keys(page):
    for key, expected in [("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 20), ("Home", 0)]:
        page.press(key)
        assert clock(page) == expected
    page.press("ArrowLeft")
    assert clock(page) == 0  # there is nothing before
    first = text(page, "#episode option:checked")
    page.press("PageDown")
    assert text(page, "#episode option:checked") != first
    page.press("PageUp")
    assert text(page, "#episode option:checked") == first


def test_slider(page):
    page.evaluate("document.querySelector('#time').focus()")
    page.press("ArrowRight")
    assert clock(page) == 1
    page.press("End")
    assert clock(page) == 20


def test_playing(page):
    page.press(" ")
    assert page.evaluate("document.querySelector('#play').ariaLabel") == "Pause"
    assert page.evaluate("document.querySelector('#said').ariaLive") == "off"
    page.wait("Number(document.querySelector('#time').value) >= 2")
    page.click("#play")
    stopped = clock(page)
    assert page.evaluate("document.querySelector('#play').ariaLabel") == "Play"
    assert page.evaluate("document.querySelector('#said').ariaLive") == "polite"
    page.evaluate("new Promise((done) => setTimeout(done, 1000))")
    assert clock(page) == stopped
    # It stops by itself at the end, and starts from the beginning there.
    page.press("End")
    page.press("ArrowLeft")
    page.evaluate("document.querySelector('#play').blur()")
    page.press(" ")
    page.wait("document.querySelector('#play').ariaLabel === 'Play'")
    assert clock(page) == 20
    page.press(" ")
    assert clock(page) < 20
    page.press(" ")


def test_what_is_shown_is_what_was_recorded(page):
    data = page.evaluate("JSON.parse(document.querySelector('#data').textContent).player")
    for episode, time in [(0, 0), (1, 5), (3, 19)]:
        page.evaluate(
            f"(() => {{ const e = document.querySelector('#episode'); e.value = {episode};"
            " e.dispatchEvent(new Event('change')); const s = document.querySelector('#time');"
            f" s.value = {time}; s.dispatchEvent(new Event('input')); }})()"
        )
        assert clock(page) == time
        action = data["actions"][data["action"][episode][time]]
        assert text(page, "#why tr.chosen td") == action
        widths = page.evaluate("[...document.querySelectorAll('#belief .fill')].map((e) => e.style.width)")
        shown = [float(width.rstrip("%")) / 100 for width in widths]
        assert shown == pytest.approx(data["posterior"][episode][time], abs=1e-3)
        marked = page.evaluate("document.querySelector('#belief .true').parentNode.firstChild.textContent")
        assert marked == data["contexts"][data["true_context"][episode]]
        seen = data["seen"]["z"][episode][time]
        said = text(page, "#saw").replace("−", "-")
        assert (
            said == "nothing"
            if seen is None
            else float(said.split("=")[1]) == pytest.approx(seen[0], rel=6e-3)
        )


def test_narrow_and_dark(browser, light_dark):
    browser.open(light_dark, width=390, height=800, dark=True)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390  # nothing sticks out
    back, ink = (
        browser.evaluate(f"getComputedStyle(document.body).{name}") for name in ("background", "color")
    )
    assert "17, 19, 24" in back
    assert "233, 235, 239" in ink
    before = picture(browser)
    browser.click("#forward")
    assert picture(browser) != before


@pytest.mark.parametrize("model", [LineGrid, ContextualTiger, Beacons], ids=lambda model: model.__name__)
def test_other_models(browser, tmp_path, model):
    made = model(horizon=5)
    # One whose policy gives actions, without probabilities.
    policy = RandomPolicy(5) if model is Beacons else lambda history: torch.zeros(history.num_episodes).long()
    browser.open(report(tmp_path / "run", made, policy, results=False))
    assert sections(browser) == ["player", "configuration"]
    start = picture(browser)
    browser.press("End")
    assert picture(browser) != start
    if model is Beacons:  # position and heading
        whole = picture(browser)
        browser.evaluate(
            "(() => { const e = document.querySelector('#part'); e.value = 1;"
            " e.dispatchEvent(new Event('change')); })()"
        )
        assert picture(browser) != whole
        assert text(browser, "#picture text").startswith("heading")
    else:
        assert browser.evaluate("document.querySelector('#part') === null")
        browser.press("Home")
        headings = texts(browser, ".why th")
        assert "Policy" not in headings


def test_the_number_above_a_curve_is_its_end(page):
    """Returns rise by 0.1 from 0.1 to 4; the thick line ends with the mean of the last three."""
    assert text(page, "#convergence figcaption span") == "3.9 at the end"
    assert "Thin: each batch. Thick" in text(page, "#convergence .note")
    assert "the 5 iterations around" in text(page, "#convergence .note")
    assert (
        page.evaluate("[...document.querySelectorAll('#convergence text')].at(-1).textContent") == "iteration"
    )


OUTSIDE = """[...document.querySelectorAll('#picture text')].filter((each) => {
  const mine = each.getBoundingClientRect(), all = document.querySelector('#player').getBoundingClientRect();
  return mine.left < all.left + 2 || mine.right > all.right - 2;
}).map((each) => each.firstChild.textContent)"""


def test_long_names_and_wide_tables(browser, tmp_path):
    """Labels stay inside the card, names do not tower, and a table that is cut says so."""

    class Wordy(LineGrid):
        actions = (LONG, "WWWWWWWWWWWWWW", "right")

    folder = tmp_path / "run"
    report(folder, Wordy(horizon=3), RandomPolicy(3))
    columns = {f"column {k}": [1.25, 2.5] for k in range(9)}
    RunFolder.open(folder).write_table("comparison.csv", columns)
    file = write_report(folder, model=Wordy(horizon=3), policy=RandomPolicy(3), num_episodes=2)
    for width in (400, 1280):
        browser.open(file, width=width)
        assert browser.evaluate(OUTSIDE) == []
        labels = browser.evaluate(
            "[...document.querySelectorAll('#picture text')].map((e) => e.firstChild.data)"
        )
        assert any(label.endswith("…") and label.startswith("WWWW") for label in labels)
        assert browser.evaluate("document.querySelector('#why tr').offsetHeight") < 70
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
    hidden = "[...document.querySelectorAll('#headline .scroll-hint')].map((each) => each.hidden)"
    assert browser.evaluate(hidden) == [True, True]  # there is room enough
    browser.open(file, width=400)
    assert browser.evaluate(hidden) == [True, False]
    last = "[...document.querySelectorAll('#headline .scroll')].at(-1)"
    assert browser.evaluate(f"{last}.classList.contains('more')")
    browser.evaluate(f"{last}.scrollLeft = 1e5")
    browser.settle()
    assert not browser.evaluate(f"{last}.classList.contains('more')")  # there is no more


def test_a_single_context(browser, tmp_path):
    """There is nothing to compare it with."""

    class Sure(LineGrid):
        contexts = ("detector right",)

        def prior(self):
            return torch.ones(1)

        def context_known_return(self):
            return None

    browser.open(report(tmp_path / "run", Sure(horizon=3), RandomPolicy(3), results=False))
    assert "context" not in text(browser, "#said")
    assert text(browser, "#belief li").endswith("100\u00a0%")


def test_every_section(browser, tmp_path):
    """Calibration, Algorithm 1 and figures of one's own, in words and numbers."""
    folder = tmp_path / "run"
    report(folder, LineGrid())
    opened = RunFolder.open(folder)
    lived = {"episode": [1, 2], "played": [True, True], "return": [1.0, 2.5], "entropy_nats": [0.5, 0.0]}
    opened.write_table("algorithm_1.csv", {"true_context": ["a", "a"], **lived, "P(a)": [0.5, 1.0]})
    tests = {"p_values": {"contexts": 1e-7}, "num_episodes": {"contexts": 9}, "hints": {"contexts": "uneven"}}
    scores = {"brier": 0.25, "expected_brier": 0.2, "ece": 0.1}
    verdict = {"likelihood": "smc", "calibrated": False, "verdict": "not calibrated: contexts (uneven)"}
    opened.write_json("calibration.json", {**verdict, **tests, **scores})
    figure = Figure()
    figure.subplots().plot([0, 1])
    opened.write_figure("mine", figure)
    browser.open(write_report(folder, model=LineGrid()))
    assert sections(browser) == [
        "headline",
        "algorithm1",
        "convergence",
        "diagnostics",
        "others",
        "configuration",
    ]
    assert text(browser, "#diagnostics p.warning").startswith("The filter “smc” is not calibrated: contexts")
    cells = texts(browser, "#diagnostics tr td")
    assert cells[:4] == ["contexts", "9", "<\u00a00.0001", "uneven"]
    cells = texts(browser, "#algorithm1 td")
    assert cells == ["1", "1", "1.00", "0.721", "0.500", "2", "1", "2.50", "0.000", "1.000"]
    browser.wait("document.querySelector('#others img').naturalWidth > 100")


def test_names_cannot_break_out(browser, tmp_path):
    class Evil(LineGrid):
        contexts = (EVIL, "plain")
        actions = (EVIL, "right", "sense")

    Evil.__doc__ = EVIL
    browser.open(report(tmp_path / "run", Evil(horizon=3), RandomPolicy(3)))
    browser.press("End")
    assert browser.evaluate("document.title") == "Evil"
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert text(browser, "#lead") == EVIL
    assert text(browser, "#belief li .top span").startswith(EVIL)


def test_a_page_without_episodes(browser, tmp_path):
    browser.open(report(tmp_path / "run", LineGrid()))
    assert sections(browser) == ["headline", "convergence", "diagnostics", "configuration"]
    browser.press("ArrowRight")


def test_the_verdict_is_at_the_top(browser, tmp_path):
    folder = RunFolder.create(tmp_path / "run", "fit", model="cpomdp_ppl.models:LineGrid", seed=1)
    (folder.path / "solution").mkdir()
    learned_by = {"": "ParticleFilter", "num_particles": 64}
    verdict = {"solved": False, "sentence": EVIL}
    folder.write_json("solution/solution.json", {"settings": {"likelihood": learned_by}, "verdict": verdict})
    folder.finish()
    browser.open(write_report(folder.path, model=LineGrid()))
    assert text(browser, "header #verdict.warning") == EVIL
    assert "learned by smc, 64 particles" in texts(browser, "#facts li")


def test_episodes_that_end_and_actions_that_are_numbers(browser, tmp_path):
    """Every episode stops at its own end, and says so; actions have axes, and promises of a few are told."""
    file = report(tmp_path / "run", Sail(), RandomPolicy(Sail.actions), results=False, seed=3)
    run = data_of(file)["player"]
    assert len(set(run["length"])) > 1
    assert True in run["ended"]
    assert False in run["ended"]
    for width in (400, 1280):
        browser.open(file, width=width)
        assert browser.evaluate(OUTSIDE) == []
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        for b, (length, ended) in enumerate(zip(run["length"], run["ended"], strict=True)):
            steer, drive = (f"{number:.3g}".replace("-", "−") for number in run["action"][b][0])
            assert f"Now: steer = {steer}, drive = {drive}" in text(browser, "#said")
            assert texts(browser, "#why tr td:first-child")[:3] == ["as chosen", "middle", "steer lowest"]
            found = [float(cell.replace("−", "-")) for cell in texts(browser, "#why td:nth-child(2)")]
            assert found == pytest.approx(run["expected_reward"][b][0], abs=0.0051)
            browser.press("End")
            assert clock(browser) == length == int(browser.evaluate("document.querySelector('#time').max"))
            assert ("ended" in text(browser, "#clock")) == ended
            over = "The episode has ended" if ended else "The episode is over"
            assert over in text(browser, "#said")
            assert "ended" not in text(browser, "#saw")
            browser.press("ArrowRight")
            assert clock(browser) == length  # there is nothing after
            browser.press("PageDown")
    assert texts(browser, "#facts li")[2:5] == [
        "actions steer −1 to 1, drive 0 to 3",
        "horizon at most 4",
        "discount 0.8",
    ]
