"""Evaluations where episodes end, rewards are discounted and paid on arrival, and actions are real numbers.

The truth is a sum over all that can happen, written as loops.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict

import pytest
import torch
from torch.distributions import Independent, Normal

from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.evaluation import Evaluation, PerEpisode, compare, evaluate
from cpomdp_ppl.models import LineGrid
from tests.programs import Reef, Sail

LEFT, RIGHT = 0, 1


class Rocky(Reef):
    rocks = 0.15


class TowardsTheReef:
    """Goes where the prior says the reef is; if that says nothing, to where the surf is not loud."""

    amortised = True

    def start(self, prior):
        return prior

    def act(self, history, memory):
        loud = history.latest.observations["surf"] == 1
        heard = history.latest.observed["surf"]
        careful = torch.where(heard & loud, LEFT, RIGHT)
        sure = memory[:, 0] != memory[:, 1]
        return torch.where(sure, memory.argmax(1), careful), memory


def every_episode(rocks, told):
    """All episodes of a reef under `TowardsTheReef`: context, probability, return, steps, end, sight."""
    found = []

    def go_on(c, t, state, p, earned, seen):
        loud = bool(seen) and seen[-1][0] == 1
        action = c if told else LEFT if loud else RIGHT
        for slips, p_slips in ((False, 0.8), (True, 0.2)):
            after = state if slips else min(max(state + (1 if action == RIGHT else -1), 0), 6)
            wrecked = after == (1 if c == 0 else 5)
            reward = abs(after - state) - 5 * wrecked
            louder = 0.7 if (after < 3 if c == 0 else after > 3) else 0.4
            p_end = 1.0 if wrecked else rocks
            for surf, p_surf in ((1, louder), (0, 1 - louder)):
                for ended, p_ended in ((True, p_end), (False, 1 - p_end)):
                    q = p * p_slips * p_surf * p_ended
                    if q == 0:
                        continue
                    value, sight = earned + 0.9**t * reward, (*seen, (surf, ended))
                    if ended or t == 3:
                        found.append((c, q, value, t + 1, ended, sight))
                    else:
                        go_on(c, t + 1, after, q, value, sight)

    for c in (0, 1):
        go_on(c, 0, 3, 0.5, 0.0, ())
    return found


def near(mean, truth):
    return abs(mean.mean - truth) < 4 * mean.standard_error


@pytest.mark.slow
def test_numbers_are_those_of_all_episodes():
    """Returns, information, ends and regret against the sum over everything that can happen."""
    truth = every_episode(Rocky.rocks, told=False)
    assert sum(p for _, p, *_ in truth) == pytest.approx(1)
    by_sight = defaultdict(lambda: [0.0, 0.0])
    for c, p, _, _, _, sight in truth:
        by_sight[sight][c] += p
    left = sum(-p * math.log2(p / sum(both)) for both in by_sight.values() for p in both if p > 0)
    share = sum(p for _, p, _, _, ended, _ in truth if ended)
    expected = sum(p * value for _, p, value, *_ in truth)
    told = sum(p * value for _, p, value, *_ in every_episode(Rocky.rocks, told=True))

    model = Rocky()
    found = evaluate(model, TowardsTheReef(), 6000, seed=0)
    assert found.likelihood == "exact"
    assert near(found.returns, expected)
    for c, mean in enumerate(found.returns_by_context.values()):
        assert near(mean, 2 * sum(p * value for k, p, value, *_ in truth if k == c))
    assert near(found.entropy, left)
    assert found.ended is not None
    assert found.end_time is not None
    assert near(found.ended, share)
    assert near(found.end_time, sum(p * n for _, p, _, n, ended, _ in truth if ended) / share)
    guessed = sum(max(both) for both in by_sight.values())
    assert abs(found.identified - guessed) < 4 * found.identified_error
    assert found.regret is not None
    assert found.regret_against == "the same policy, told the context"
    assert near(found.regret, told - expected)
    each = found.per_episode
    assert each is not None
    assert near(each.mean(each.reference_returns), told)
    assert near(each.mean(each.lengths), sum(p * n for _, p, _, n, *_ in truth))
    assert torch.equal(each.ended | (each.lengths == model.horizon), torch.ones(6000).bool())
    # Nobody earns more who knows the context and sees where it is.
    assert found.informed_return is not None
    assert found.informed_return >= max(expected, told)


def test_what_is_printed_and_written():
    model = Rocky()
    policies = {"towards": TowardsTheReef(), "random": RandomPolicy(model.actions)}
    table = compare(model, policies, 40)
    found = table.evaluations["random"]
    (line,) = (line for line in str(found).splitlines() if line.startswith("ended"))
    share, error, time = 100 * found.ended.mean, 100 * found.ended.standard_error, found.end_time
    words = f"{share:.1f} ± {error:.1f} %, after {time.mean:.2f} ± {time.standard_error:.2f} steps"
    assert line.split(maxsplit=1)[1] == words
    assert f" | {share:.1f} % | " in str(table)
    content = json.loads(json.dumps(found.as_dict()))
    assert Evaluation.from_dict(content) == found
    del content["ended"], content["end_time"]  # as written by earlier versions
    assert Evaluation.from_dict(content).ended is None
    single = PerEpisode.from_dict(json.loads(json.dumps(found.per_episode.as_dict())))
    assert torch.equal(single.ended, found.per_episode.ended)
    assert torch.equal(single.lengths, found.per_episode.lengths)
    never = compare(LineGrid(), {"random": RandomPolicy(3)}, 20)
    assert never.evaluations["random"].ended is None
    assert never.evaluations["random"].per_episode.ended is None
    assert "ended" not in str(never) + str(never.evaluations["random"])


def test_none_that_ended():
    """Where none happens to end, there is no time of the end; and one that did has no standard error."""

    class Safe(Reef):
        horizon = 1  # nobody gets to the reef in one step

    found = evaluate(Safe(), RandomPolicy(2), 10)
    assert found.ended.mean == 0
    assert found.end_time is None
    assert "0.0 ± 0.0 %" in str(found)
    assert Evaluation.from_dict(json.loads(json.dumps(found.as_dict()))) == found


def test_noise_is_paired_whatever_is_drawn_of_a_box():
    """A policy that draws its real numbers meets the same world as one that gives the very same."""
    model, place = Sail(), torch.tensor([0.5, 1.0])

    def given(history):
        return place.expand(history.num_episodes, 2)

    def drawn(history):
        mean = place.expand(history.num_episodes, 2)
        return Independent(Normal(mean, torch.full_like(mean, 1e-30)), 1)

    one, two = (evaluate(model, policy, 60, seed=5, likelihood="smc") for policy in (given, drawn))
    assert one.returns == two.returns
    assert torch.equal(one.per_episode.lengths, two.per_episode.lengths)


def test_distributions_of_another_shape_are_refused():
    def without_event(history):
        return Normal(torch.full((history.num_episodes, 2), 0.5), 1e-3)

    with pytest.raises(ValueError, match=r"policy: expected batch shape \[10\] and event shape \[2\]"):
        evaluate(Sail(), without_event, 10, likelihood="smc")


def test_returns_of_a_box_are_discounted_up_to_the_end():
    """The returns that an evaluation averages are those of a loop over its episodes' rewards."""
    model, seen = Sail(), []

    class Noting(RandomPolicy):
        def act(self, history, memory):
            seen.append(history)
            return super().act(history, memory)

    found = evaluate(model, Noting(model.actions), 30, likelihood="smc", seed=2)
    ended = seen[-1].observations["ended"][:, 1:]  # up to the last decision
    for b, length in enumerate(found.per_episode.lengths.tolist()):
        stopped = [t + 1 for t in range(ended.shape[1]) if ended[b, t] == 1]
        assert length == (stopped[0] if stopped else model.horizon)
    episodes = simulate(model, RandomPolicy(model.actions), 50, seed=3)
    for b in range(50):
        worth = sum(0.8**t * float(episodes.rewards[b, t]) for t in range(int(episodes.lengths[b])))
        assert float(episodes.returns[b]) == pytest.approx(worth, rel=1e-5)
        assert bool(episodes.ended[b]) == bool((episodes.observations["ended"][b] == 1).any())
