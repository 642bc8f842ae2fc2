from __future__ import annotations

import itertools

import pytest
import torch

from cpomdp_ppl import simulate
from cpomdp_ppl.bounds import informed_return
from cpomdp_ppl.inference import ObservableOperator, ParticleFilter
from cpomdp_ppl.models import Office
from cpomdp_ppl.models.office import PLAN
from tests.conftest import assert_mean, fixed_actions

NORTH, EAST, SOUTH, WEST, ASK, LISTEN = range(6)
PLACES = [(i, j) for i, row in enumerate(PLAN) for j, mark in enumerate(row) if mark != "#"]
MARKS = [PLAN[i][j] for i, j in PLACES]


def test_it_is_a_proper_model():
    Office().check()
    Office().double().check()


def step_by_hand(place, action):
    """Where a step leads in the plan."""
    i, j = place
    di, dj = {NORTH: (-1, 0), EAST: (0, 1), SOUTH: (1, 0), WEST: (0, -1)}.get(action, (0, 0))
    inside = 0 <= i + di < len(PLAN) and 0 <= j + dj < len(PLAN[0])
    return (i + di, j + dj) if inside and PLAN[i + di][j + dj] != "#" else place


def test_every_step_from_every_cell_leads_where_the_plan_says():
    model = Office()
    assert model.states == len(PLACES)
    for (n, place), action in itertools.product(enumerate(PLACES), range(6)):
        assert PLACES[int(model.next_cell[n, action])] == step_by_hand(place, action)


def test_steps_fail_now_and_then():
    episodes = simulate(Office(horizon=1), fixed_actions(WEST), 20_000, seed=0)
    assert_mean((episodes.states[:, 1] == episodes.states[:, 0]).float(), 0.1, "failed")
    assert torch.equal(episodes.observations["cell"][:, 0].long(), episodes.states[:, 1])


def search(start):
    """How many steps every place is away, breadth first."""
    steps, frontier = {start: 0}, [start]
    for place in frontier:
        for action in range(4):
            following = step_by_hand(place, action)
            if following not in steps:
                steps[following] = steps[place] + 1
                frontier.append(following)
    return steps


def test_every_room_is_ten_steps_away_and_nothing_is_earned_before():
    model, steps = Office(), search(PLACES[MARKS.index("*")])
    assert [steps[PLACES[MARKS.index(room)]] for room in "ABCDEFGH"] == [10] * 8
    for n, place in enumerate(PLACES):
        for room, letter in enumerate("ABCDEFGH"):
            assert int(model.distance[n, room]) == search(PLACES[MARKS.index(letter)])[place]
        for context in range(8):
            reward = float(model.reward(torch.tensor(n), torch.tensor(0), torch.tensor(context)))
            expected = 0.0 if MARKS[n] not in "ABCDEFGH" else 1.0 if MARKS[n] == "ABCDEFGH"[context] else -1.0
            assert reward == expected
            assert steps[place] >= 10 or reward == 0.0


@pytest.mark.parametrize(("site", "action"), [("answer", ASK), ("sound", LISTEN)])
@pytest.mark.parametrize("where", ["*", "?", "A"])
def test_answers_and_sounds_have_their_tables(site, action, where):
    """In context A, how often each room is named."""
    way = {"*": [NORTH, SOUTH], "?": [NORTH] * 3, "A": [WEST] * 5 + [NORTH] * 3 + [WEST] * 2}[where]
    model = Office(horizon=len(way) + 1, slip=0.0)
    episodes = simulate(model, fixed_actions(*way, action), 8000, contexts=0, seed=0)
    assert MARKS[int(episodes.states[0, -1])] == where
    better = {"answer": {"?": 0.5}, "sound": {"*": 0.85**10, "?": 0.85**13, "A": 1.0}}[site].get(where, 0.0)
    named = episodes.observations[site][:, -1]
    for room in range(8):
        chance = (1 - better) / 8 + better * (room == 0)
        assert_mean((named == room).float(), chance, f"{site} {room}", sd=(chance * (1 - chance)) ** 0.5)


def test_who_knows_the_room_walks_there():
    """The walk takes ten steps that succeed: by time t with the chance that t tries have ten successes."""
    T, ways = 40, [1.0] + [0.0] * 10  # chances of 0 … 10 steps done
    total = 0.0
    for _ in range(T):
        total += ways[10]
        ways = [(0.1 if k < 10 else 1.0) * ways[k] + (0.9 * ways[k - 1] if k else 0.0) for k in range(11)]
    assert torch.allclose(informed_return(Office()), torch.tensor(total, dtype=torch.float64))


@pytest.mark.slow
def test_the_compiled_filter_is_unbiased():
    model = Office(horizon=5)  # 256 particles: where a step failed, those that took it are lost
    one = simulate(model, fixed_actions(NORTH, ASK, LISTEN, WEST, LISTEN), 1, contexts=0, seed=3)
    many, times = one[torch.zeros(400, dtype=torch.long)], 400
    exact = ObservableOperator().run(model, one).log_likelihood
    for engine in ("native", "eager"):
        found = ParticleFilter(256, engine=engine).run(model, many, seed=0).log_likelihood
        ratio = (found - exact).exp()  # [times, C]
        error = ratio.std(0) / times**0.5
        assert bool(((ratio.mean(0) - 1).abs() < 4.5 * error + 1e-6).all())
