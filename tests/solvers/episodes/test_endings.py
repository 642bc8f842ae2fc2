"""Algorithm 1 where episodes end, rewards are discounted and actions real: posteriors by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from cpomdp_ppl import RandomPolicy
from cpomdp_ppl.gym import CPOMDPEnv
from cpomdp_ppl.inference import ExtendedKalmanFilter
from solvers import cids, exact
from tests.programs import Reef, Sail

QUICK = {"likelihood": "exact", "progress": False, "seed": 0}


class Rocks(Reef):
    """An episode may end anywhere; where nothing has ended, either reef may be near."""

    rocks = 0.15


class Lagoon:
    """The same world, as somebody would write it who has never heard of this toolkit.

    It notes what really happened: by episode, actions, what was seen, and whether that was the end.
    """

    def __init__(self, form: str, seed: int, reef: int = 0) -> None:
        self.form, self.reef = form, reef
        self.random = random.Random(seed)
        self.noted: list[list[tuple[int, float, bool | None]]] = []
        self.earned: list[float] = []

    def reset(self):
        self.x, self.t = 3, 0
        self.noted.append([])
        self.earned.append(0.0)
        return ({}, {"weather": "fair"}) if self.form.startswith("five") else {}

    def step(self, action):
        before = self.x
        if self.random.random() > 0.2:
            self.x = min(6, max(0, self.x + 2 * action - 1))
        aground = self.x == (1 if self.reef == 0 else 5)
        ended = aground or self.random.random() < Rocks.rocks
        towards = self.x < 3 if self.reef == 0 else self.x > 3
        surf = float(self.random.random() < (0.7 if towards else 0.4))
        reward = abs(self.x - before) - 5.0 * aground
        self.earned[-1] += 0.9**self.t * reward
        self.t += 1
        late = self.t == 4
        known = ended
        if self.form in ("three", "four") and late and (ended or late):
            known = None  # it is over either way, and nobody says why
        self.noted[-1].append((action, surf, known))
        if self.form == "five":
            return {"surf": surf}, reward, ended, late and not ended, {}
        if self.form == "five with info":
            return {"surf": surf}, reward, ended or late, False, {"ended": ended}
        if self.form == "four with ended":
            return {"surf": surf, "ended": ended}, reward, ended or late, {}
        return (surf, reward, ended or late, *[{}] * (self.form == "four"))


def by_hand(episode) -> np.ndarray:
    """`log p(seen | done, c)` of one episode, `[2]`, summed over all paths of states."""
    found = np.zeros(2)
    for c, (reef, shallow) in enumerate([(1, range(3)), (5, range(4, 7))]):
        p = np.eye(7)[3]
        for action, surf, ended in episode:
            moved = np.zeros(7)
            for x in range(7):
                moved[x] += 0.2 * p[x]
                moved[min(6, max(0, x + 2 * action - 1))] += 0.8 * p[x]
            for x in range(7):
                says = 0.7 if x in shallow else 0.4
                moved[x] *= says if surf else 1 - says
                over = 1.0 if x == reef else Rocks.rocks
                moved[x] *= 1.0 if ended is None else over if ended else 1 - over
            p = moved
        found[c] = np.log(p.sum()) if p.sum() > 0 else -1e9
    return found


def bayes(prior, episodes) -> np.ndarray:
    """Posteriors `[K + 1, 2]`, episode after episode."""
    log_p = np.cumsum([np.log(prior), *map(by_hand, episodes)], 0)
    p = np.exp(log_p - log_p.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


FORMS = ["three", "four", "four with ended", "five", "five with info"]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_environments_of_every_form(form):
    """That an episode goes on is evidence, and so is its end, but not that the horizon is reached."""
    lagoons = [Lagoon(form, 7 + r, reef) for r, reef in enumerate([0, 1, 0, 1])]
    run = cids.run(Rocks(), lagoons, 5, solution=RandomPolicy(2), prior=[0.4, 0.6], **QUICK)
    lengths, unsure = set(), 0
    for r, lagoon in enumerate(lagoons):
        np.testing.assert_allclose(run.posteriors[r], bayes([0.4, 0.6], lagoon.noted), atol=1e-9)
        np.testing.assert_allclose(run.returns[r], lagoon.earned, rtol=1e-6)
        for k, steps in enumerate(lagoon.noted):
            n = len(steps)
            episode = run.episodes[k][r]
            assert episode.lengths.tolist() == [n]
            assert episode.actions[0, :n].tolist() == [action for action, *_ in steps]
            assert episode.observed["ended"][0, :n].tolist() == [known is not None for *_, known in steps]
            assert episode.observations["ended"][0, :n].tolist() == [bool(known) for *_, known in steps]
            lengths.add((n, steps[-1][-1]))
            unsure += steps[-1][-1] is None
    assert {1, 2, 3, 4} >= {n for n, _ in lengths} >= {2, 4}
    assert (unsure > 0) == (form in ("three", "four"))
    if not unsure:
        assert {(4, True), (4, False)} <= lengths


class Spied(CPOMDPEnv):
    """Notes what happened."""

    def reset(self, **settings):
        self.noted = [*getattr(self, "noted", []), []]
        return super().reset(**settings)

    def step(self, action):
        call = super().step(action)
        self.noted[-1].append((int(action), bool(call[0]["surf"]), call[-1]["ended"]))
        self.last = call[-1]["return"]
        return call


@pytest.mark.slow
def test_our_own_environment_says_which_ends_are_ends():
    """It terminates at the horizon, too: that is no evidence."""
    env = Spied(Rocks(), prior=[0.0, 1.0], seed=1)
    returns = []
    run = cids.run(
        Rocks(), env, 12, solution=RandomPolicy(2), callbacks=[lambda _: returns.append(env.last)], **QUICK
    )
    np.testing.assert_allclose(run.posteriors[0], bayes([0.5, 0.5], env.noted), atol=1e-9)
    np.testing.assert_allclose(run.returns[0], returns, rtol=1e-6)
    lasts = [(len(steps), steps[-1][-1]) for steps in env.noted]
    assert (4, False) in lasts
    assert any(ended for _, ended in lasts)


@pytest.mark.slow
def test_simulated_worlds_carry_ends_and_discounts_on():
    model = Rocks()
    run = cids.run(model, [0, 1] * 3, 4, solution=RandomPolicy(2), prior=[0.4, 0.6], **QUICK)
    assert len({n for batch in run.episodes for n in batch.lengths.tolist()}) > 2
    for r in range(6):
        noted = []
        for k, batch in enumerate(run.episodes):
            n, rewards = int(batch.lengths[r]), batch.rewards[r].tolist()
            seen = [batch.actions, batch.observations["surf"], batch.observations["ended"]]
            noted.append(list(zip(*(series[r, :n].tolist() for series in seen), strict=True)))
            earned = sum(0.9**t * reward for t, reward in enumerate(rewards[:n]))
            assert float(run.returns[r, k]) == pytest.approx(earned, abs=1e-6)
        np.testing.assert_allclose(run.posteriors[r], bayes([0.4, 0.6], noted), atol=1e-9)
    optima = torch.tensor([exact.plan(model, prior=point).value for point in np.eye(2)])
    torch.testing.assert_close(run.regret(), optima[run.contexts][:, None] - run.returns)


class Breeze:
    """A boat that somebody else wrote, with the old form of `step`."""

    def __init__(self, seed: int) -> None:
        self.random, self.actions, self.ends = random.Random(seed), [], []

    def reset(self):
        self.x, self.t = self.random.gauss(0, 0.5), 0

    def step(self, action):
        self.actions.append(action)
        self.x += action[0] * action[1] - 0.5 + self.random.gauss(0, 0.3)
        self.t += 1
        ended = abs(self.x) > 2
        self.ends.append(ended)
        seen = self.random.gauss(self.x, 0.5) if action[1] < 2 else None
        return seen, self.x, ended or self.t == 4, {}


@pytest.mark.slow
def test_real_numbers_reach_the_environment():
    model, breeze = Sail(), Breeze(3)
    settings = {**QUICK, "likelihood": "ekf", "solution": RandomPolicy(model.actions)}
    run = cids.run(model, breeze, 6, **settings)
    log_joint = model.prior().double().log()
    for k, episode in enumerate(run.episodes):
        log_joint = log_joint + ExtendedKalmanFilter().run(model, episode).log_likelihood[0]
        torch.testing.assert_close(run.posteriors[0, k + 1], log_joint.softmax(-1))
    assert all(isinstance(action, np.ndarray) and action.shape == (2,) for action in breeze.actions)
    taken = np.concatenate([episode.actions[0, : int(episode.lengths)].numpy() for episode in run.episodes])
    np.testing.assert_array_equal(taken, breeze.actions)
    data = run.to_inference_data(draws=2).observed_data
    assert data["action"].shape == (1, 6, max(episode.horizon for episode in run.episodes), 2)
    assert int(data["action"].notnull().sum()) == 2 * len(breeze.actions)
