from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import DictInfoToList, RecordEpisodeStatistics

from cpomdp_ppl import CPOMDP, Episodes, ModelError, Percept, RandomPolicy, simulate
from cpomdp_ppl.actions import Box
from cpomdp_ppl.gym import LARGEST, CPOMDPEnv, CPOMDPVectorEnv, SpaceEncoding
from cpomdp_ppl.inference import GridFilter, as_backend
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark, LineGrid
from tests.conftest import fixed_actions
from tests.programs import EyesOpen, Learnable, Plates, Reef, Sail, Walk
from tests.solvers.machines import Mortal

PROGRAMS = [LightDark, LineGrid, ContextualTiger, Beacons, Plates, EyesOpen, Learnable]


class Awake(Mortal):
    """Sees something before it acts; ends, pays on arrival, and discounts."""

    def __init__(self):
        super().__init__(2, awake=True, horizon=4)


class Fuse(CPOMDP):
    """Nothing in it is random: it burns down after 1, 3 or 5 = T steps, or never. Action 1 is worth more."""

    contexts, horizon, discount, states = ("short", "middling", "long", "endless"), 5, 0.5, 8
    actions = ("wait", "blow")

    def initial(self, context):
        return context % 2

    def transition(self, state, action, context):
        return (state + 1).clamp(max=7)

    def observation(self, state, action, context):
        pyro.sample("glows", dist.Bernoulli((state % 2).float()))
        seen = torch.tensor(True) if action is None else self.strength(action) > 0.5
        pyro.sample("length", dist.Categorical(torch.eye(8)[state]).mask(seen))

    def ends(self, state, action, context):
        return state - context % 2 >= torch.tensor([1, 3, 5, 99])[context]

    def reward(self, state, action, context, next_state):
        return 10.0 * context + state * self.strength(action) + 0.25 * next_state

    def strength(self, action):
        return action.float()


class Lit(Fuse):
    """The same with an initial observation, and actions between 0 and 1."""

    initial_observation = True
    actions = Box(0.0, 1.0, names=("blow",))

    def strength(self, action):
        return action[..., 0]


ENDING = [Reef, Sail, Awake, Fuse, Lit]


class Dice(Walk):
    """Sees integers: one from 1 to 6, a pair of them if asked for, a coin, and one of a hundred."""

    def observation(self, state, action, context):
        faces = torch.ones(*context.shape, 7)
        faces[..., 0] = 0.0
        pyro.sample("die", dist.Categorical(faces))
        pair = dist.Categorical(torch.ones(2, 6) / 6).to_event(1)
        pyro.sample("pair", pair.mask(action == 1))
        pyro.sample("coin", dist.Categorical(torch.ones(2)))
        pyro.sample("wheel", dist.Categorical(torch.ones(100)))


def play(env, actions, **reset):
    """Everything an episode returned, one tuple for each call."""
    calls = [env.reset(**reset)]
    calls += [env.step(action) for action in actions]
    return calls


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and np.array_equal(one, other)


def shapes(tree):
    """Types and shapes instead of numbers."""
    if isinstance(tree, dict):
        return {key: shapes(value) for key, value in tree.items()}
    if isinstance(tree, np.ndarray) and tree.dtype == object:
        return [shapes(value) for value in tree]
    return str if isinstance(tree, str) else (np.asarray(tree).dtype, np.shape(tree))


@pytest.mark.filterwarnings("ignore:.*we recommend using a symmetric and normalized space")
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("program", [*PROGRAMS, Dice, *ENDING])
def test_gymnasiums_own_checks(program, flat):
    """Their warnings are errors here."""
    check_env(CPOMDPEnv(program(), flat=flat), skip_render_check=True)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("program", [*PROGRAMS, Dice])
def test_an_episode_ends_with_the_horizon_inside_its_spaces(program, flat):
    model = program()
    env = CPOMDPEnv(model, flat=flat, seed=0)
    env.action_space.seed(0)
    (observation, _), *steps = play(env, [env.action_space.sample() for _ in range(model.horizon)])
    assert observation in env.observation_space
    assert all(step[0] in env.observation_space for step in steps)
    assert [step[2] for step in steps] == [False] * (model.horizon - 1) + [True]
    assert not any(step[3] for step in steps)
    assert all(type(step[1]) is float for step in steps)


def test_the_same_seed_gives_the_same_episode(model):
    actions = [t % model.num_actions for t in range(model.horizon)]
    env = CPOMDPEnv(model)
    first = play(env, actions, seed=3)
    second = play(env, actions)
    assert same(first, play(env, actions, seed=3))
    assert same(second, play(env, actions))
    assert same(first, play(CPOMDPEnv(model, seed=3), actions))
    assert not same(first, second)


def test_a_filter_changes_nothing():
    actions = [2, 0, 2, 2]
    plain = play(CPOMDPEnv(LightDark()), actions, seed=1)
    watched = play(CPOMDPEnv(LightDark(), likelihood="smc"), actions, seed=1)
    for call, other in zip(plain, watched, strict=True):
        assert other[-1].pop("posterior").shape == (2,)
        assert same(call, other)


@pytest.mark.parametrize("make", [CPOMDPEnv, lambda model, **rest: CPOMDPVectorEnv(model, 3, **rest)])
def test_handlers_around_an_environment_see_nothing(make):
    env = make(Learnable(), likelihood="ekf")
    with pyro.poutine.trace() as traced:
        env.reset(seed=0)
        env.step(np.zeros(getattr(env, "num_envs", 1), int).squeeze())
    assert not traced.trace.nodes


def assert_alike(samples, others, what):
    """Columns of two samples `[n, K]` and `[m, K]` have the same means, within 4.5 standard errors."""
    samples, others = (np.asarray(s, float).reshape(len(s), -1) for s in (samples, others))
    gap = samples.mean(0) - others.mean(0)
    error = np.sqrt(samples.var(0) / len(samples) + others.var(0) / len(others))
    assert (np.abs(gap) <= 4.5 * error + 1e-6).all(), f"{what}: {gap} ± {error}"


def assert_same_distribution(calls, episodes):
    """Of steps `(observations, rewards, …, info)` of a batch, and of simulated episodes."""
    infos = [call[-1] for call in calls]
    assert_alike(infos[0]["context"], episodes.contexts, "context")
    assert_alike(np.stack([c[1] for c in calls[1:]], 1), episodes.rewards, "reward")
    for site, values in episodes.observations.items():
        seen = np.stack([c[0][f"{site}_seen"] for c in calls[1:]], 1)
        assert_alike(seen, episodes.observed[site], site)
        mine = np.stack([c[0][site] for c in calls[1:]], 1).reshape(len(seen), -1)
        theirs = values.numpy().reshape(len(values), -1)
        assert_alike(mine, theirs, site)
        assert_alike(mine**2, theirs**2, f"{site}²")
        assert_alike(mine[:, 1:] * mine[:, :-1], theirs[:, 1:] * theirs[:, :-1], f"{site} of two steps")
    mine, theirs = infos[-1]["state"], episodes.states
    for name in mine.keys() - {f"_{key}" for key in mine} if isinstance(mine, dict) else [None]:
        last, other = (mine, theirs) if name is None else (mine[name], theirs[name])
        assert_alike(last, other[:, -1], "last state")
        assert_alike(last**2.0, other[:, -1] ** 2, "last state²")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_batch_is_distributed_as_in_simulate(program):
    model = program()
    actions = [(2 * t + t // 3) % model.num_actions for t in range(model.horizon)]
    prior = np.arange(1.0, model.num_contexts + 1) / np.arange(1, model.num_contexts + 1).sum()
    episodes = simulate(model, fixed_actions(*actions), 4000, prior=torch.tensor(prior), seed=0)
    envs = CPOMDPVectorEnv(model, 4000, prior=prior)
    calls = play(envs, [np.full(4000, a) for a in actions], seed=1)
    assert_same_distribution(calls, episodes)


@pytest.mark.slow
@pytest.mark.parametrize("program", [LightDark, ContextualTiger])
def test_single_episodes_are_distributed_as_in_simulate(program):
    model = program(3)
    actions = [2, 0, 2]
    episodes = simulate(model, fixed_actions(*actions), 4000, seed=0)
    env = CPOMDPEnv(model, seed=1)
    runs = [play(env, actions) for _ in range(250)]

    def batched(trees):
        if isinstance(trees[0], dict):
            return {key: batched([tree[key] for tree in trees]) for key in trees[0]}
        return np.stack(trees)

    calls = [tuple(batched(part) for part in zip(*call, strict=True)) for call in zip(*runs, strict=True)]
    assert_same_distribution(calls, episodes)


def test_an_agent_is_told_what_it_may_know():
    env = CPOMDPEnv(EyesOpen(), seed=0)
    (first, _), step = play(env, [1])
    assert first["previous_action"] == 2  # none yet
    assert first["time"] == 0
    assert (first["z_seen"], first["w_seen"]) == (1, 0)
    assert first["z"] != 0
    assert first["w"] == 0
    assert step[0]["previous_action"] == 1
    assert step[0]["time"] == np.float32(1 / 3)
    assert (step[0]["z_seen"], step[0]["w_seen"]) == (1, 1)


def test_an_agent_is_told_nothing_else():
    """Without looking, either context and any position are all the same to it."""
    env = CPOMDPEnv(LightDark(4))
    runs = [play(env, [0, 1, 1, 0], seed=seed, options={"context": seed}) for seed in (0, 1)]
    assert same(*([call[0] for call in run] for run in runs))
    assert not same(*(run[-1][-1]["state"] for run in runs))


def test_integers_are_counted_from_zero():
    model = Dice()
    env = CPOMDPEnv(model, seed=0)
    space = env.observation_space
    assert space["die"].n == 7
    assert space["pair"].nvec.tolist() == [6, 6]
    assert space["coin"].shape == (1,)
    assert space["wheel"].high == LARGEST
    (first, _), blinded, step = play(env, [0, 1])
    assert type(step[0]["die"]) is np.int64
    assert (first["die"], first["die_seen"]) == (0, 0)
    assert (blinded[0]["pair"].tolist(), blinded[0]["pair_seen"].tolist()) == ([0, 0], [0])
    assert 1 <= step[0]["die"] <= 6
    assert step[0]["pair_seen"] == 1


def percept(action, **sites):
    """One episode's percept; None stands for what was not seen."""
    observed = {name: torch.tensor([value is not None]) for name, value in sites.items()}
    observations = {name: torch.tensor([0.0 if value is None else value]) for name, value in sites.items()}
    return Percept(None if action is None else torch.tensor([action]), observations, observed)


def test_the_flat_vector():
    encoding = SpaceEncoding(LineGrid(), flat=True)
    assert encoding.encode(percept(None, side=None), 0).tolist() == [[0, 0, 0, 1, 0, 0, 0]]
    seen = encoding.encode(percept(2, side=1.0), 5)
    assert seen.tolist() == [[0, 0, 1, 0, 0.5, 1, 1]]
    assert seen.dtype == np.float32
    assert seen[0] in encoding.space


def test_the_flat_vector_of_real_numbers():
    """Steering from -1 to 1; driving, from 0 to 3, likewise; whether there was no action; the time; z."""
    encoding = SpaceEncoding(Sail(), flat=True)
    (first,) = encoding.encode(percept(None, z=None, ended=None), 0)
    assert first.tolist() == [0, 0, 1, 0, 0, 0]
    seen = {"z": torch.tensor([7.0]), "ended": torch.tensor([1.0])}
    shown = {name: torch.ones(1, dtype=torch.bool) for name in seen}
    (then,) = encoding.encode(Percept(torch.tensor([[0.5, 2.25]]), seen, shown), 1)
    assert then.tolist() == [0.5, 0.5, 0, 0.25, 1, 7]
    assert first in encoding.space
    assert then in encoding.space
    named = SpaceEncoding(Sail())
    assert sorted(named.space) == ["previous_action", "time", "z", "z_seen"]
    assert named.encode(Percept(torch.tensor([[0.5, 2.25]]), seen, shown), 1)["previous_action"].tolist() == [
        [0.5, 2.25]
    ]


def test_the_flat_vector_says_nothing_of_what_was_not_seen():
    env = CPOMDPEnv(Dice(), flat=True, seed=0)
    (first, _), step, other = play(env, [0, 1])
    die, pair = slice(4, 12), slice(12, 25)  # after the previous action and the time: flag, then one-hot
    assert first[4:].tolist() == [0] * (len(first) - 4)
    assert step[0][die].sum() == 2
    assert step[0][pair].sum() == 0
    assert other[0][pair].sum() == 3


def test_numbers_too_large_for_float32_stay_in_the_space():
    encoding = SpaceEncoding(LightDark())
    huge = torch.tensor([1e300], dtype=torch.float64)
    encoded = encoding.encode(Percept(None, {"z": huge}, {"z": torch.tensor([True])}), 0)
    assert encoded["z"] == LARGEST


def test_a_site_must_not_take_another_name():
    class Clock(Walk):
        def observation(self, state, action, context):
            pyro.sample("time", dist.Normal(state, 1.0))

    with pytest.raises(ValueError, match=r"model: .*time"):
        CPOMDPEnv(Clock())
    check_env(CPOMDPEnv(Clock(), flat=True), skip_render_check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "backend"),
    [
        (LineGrid(), "exact"),
        (LightDark(horizon=4), GridFilter(num_points=64)),
        (Plates(), "ekf"),
        (EyesOpen(), "ekf"),
        (Beacons(), "ekf"),
    ],
    ids=lambda part: part if isinstance(part, str) else type(part).__name__,
)
def test_the_posterior_is_the_filters(model, backend):
    B, T = 5, model.horizon
    rng = np.random.default_rng(0)
    actions = rng.integers(model.num_actions, size=(B, T))
    prior = rng.dirichlet(np.ones(model.num_contexts), B)
    envs = CPOMDPVectorEnv(model, B, likelihood=backend, prior=prior)
    (first, info), *steps = play(envs, list(actions.T), seed=0)
    posteriors = np.stack([info["posterior"], *(step[-1]["posterior"] for step in steps)], 1)

    sites = envs.encoding.sites

    def seen(observations, *axes):
        values = {
            k: np.stack([o[k] for o in observations], 1).reshape(*axes, *s.shape) for k, s in sites.items()
        }
        flags = {
            k: np.stack([o[f"{k}_seen"] for o in observations], 1).reshape(*axes, *s.plates) == 1
            for k, s in sites.items()
        }
        return values, flags

    extra = {}
    if model.initial_observation:
        extra["initial_observations"], extra["initially_observed"] = seen([first], B)
    values, flags = seen([step[0] for step in steps], B, T)
    episodes = Episodes.from_arrays(model, actions, values, observed=flags, **extra)
    expected = as_backend(backend).run(model, episodes, seed=0).posterior(torch.tensor(prior))
    np.testing.assert_allclose(posteriors, expected, rtol=1e-5, atol=1e-7)


def test_the_context_can_be_chosen():
    env = CPOMDPEnv(ContextualTiger(), seed=0)
    for context in (2, "right dull", np.int64(2)):
        info = env.reset(options={"context": context})[1]
        assert (info["context"], info["context_name"]) == (2, "right dull")
    envs = CPOMDPVectorEnv(ContextualTiger(), 3)
    assert envs.reset(options={"context": "left dull"})[1]["context"].tolist() == [1, 1, 1]
    infos = envs.reset(options={"context": [2, 0, 1]})[1]
    assert infos["context_name"].tolist() == ["right dull", "both sharp", "left dull"]


def test_what_info_holds(model):
    env = CPOMDPEnv(model, seed=0)
    info = env.reset()[1]
    assert list(info) == ["context", "context_name", "state", "ended", "return", "discount"]
    assert (info["ended"], info["return"], info["discount"]) == (False, 0.0, 1.0)
    assert type(info["ended"]) is bool
    states = info["state"].values() if isinstance(info["state"], dict) else [info["state"]]
    assert all(isinstance(state, np.ndarray) for state in states)


def test_what_was_handed_out_belongs_to_the_caller():
    class Still(Walk):
        def transition(self, state, action, context):
            return state

    env = CPOMDPEnv(Still(), seed=0)
    info = env.reset()[1]
    position = info["state"].copy()
    info["state"][...] = 99.0
    assert env.step(0)[-1]["state"] == position


def test_bad_arguments():
    env = CPOMDPEnv(LightDark(2), seed=0)
    with pytest.raises(ResetNeeded, match="call reset"):
        env.step(0)
    env.reset()
    for action in (3, -1, [0], "jump", 0.5, None, True):
        with pytest.raises(ValueError, match="action: expected"):
            env.step(action)
    with pytest.raises(ValueError, match=r"0 to 2 \(left, right, observe\), got 3"):
        env.step(3)
    for context in (2, "nowhere", [0, 1]):
        with pytest.raises(ValueError, match=r"options\['context'\]: expected"):
            env.reset(options={"context": context})
    with pytest.raises(ValueError, match=r"options: .*contexts"):
        env.reset(options={"contexts": 1})
    play(env, [0, 0])
    with pytest.raises(ResetNeeded, match="over after 2 steps"):
        env.step(0)
    with pytest.raises(ValueError, match="prior"):
        CPOMDPEnv(LightDark(), prior=[0.7, 0.7])
    with pytest.raises(ValueError, match="likelihood"):
        CPOMDPEnv(LightDark(), likelihood="magic")
    with pytest.raises(ValueError, match="model"):
        CPOMDPEnv(LightDark)
    with pytest.raises(ValueError, match="num_envs"):
        CPOMDPVectorEnv(LightDark(), 0)
    with pytest.raises(ValueError, match=r"autoreset_mode: .*SameStep.*sometimes"):
        CPOMDPVectorEnv(LightDark(), 2, autoreset_mode="sometimes")
    envs = CPOMDPVectorEnv(LightDark(), 2)
    envs.reset()
    with pytest.raises(ValueError, match=r"actions: .*shape \[2\]"):
        envs.step([0, 1, 2])


def test_programs_that_leave_the_reals_are_named():
    class Broken(Walk):
        def reward(self, state, action, context):
            return state / (action - 1)

    env = CPOMDPEnv(Broken(), seed=0)
    env.reset()
    env.step(0)
    with pytest.raises(ModelError, match="reward: 'reward' is not finite at time 1"):
        env.step(1)
    env.step(0)  # the step that failed was none


@pytest.mark.slow
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("program", [LineGrid, Beacons, Plates])
def test_a_batch_has_the_form_that_gymnasium_gives_to_one(program, flat, mode):
    """Calls return what Gymnasium's own batch of single environments returns, over the end of an episode."""
    model = program()
    made = CPOMDPVectorEnv(model, 3, flat=flat, autoreset_mode=mode, likelihood="smc")
    theirs = SyncVectorEnv([lambda: CPOMDPEnv(model, flat=flat, likelihood="smc")] * 3, autoreset_mode=mode)
    assert made.metadata["autoreset_mode"] is mode
    assert made.observation_space == theirs.observation_space
    assert made.action_space == theirs.action_space
    actions = [np.full(3, t % model.num_actions) for t in range(model.horizon + 2)]
    for call, other in zip(play(made, actions, seed=0), play(theirs, actions, seed=0), strict=True):
        assert call[0] in made.observation_space
        assert shapes(call[0]) == shapes(other[0])
        assert shapes(call[-1]) == shapes(other[-1])
        assert same(call[2:4], other[2:4])
        if len(call) > 2:
            assert shapes(call[1]) == shapes(other[1])


def test_a_new_episode_on_the_next_step():
    envs = CPOMDPVectorEnv(LightDark(2), 4, seed=0)
    calls = play(envs, [np.full(4, 1)] * 4)
    _, one, two, begin, again = calls
    assert not one[2].any()
    assert two[2].all()
    assert not begin[1].any()
    assert not begin[2].any()
    assert (begin[0]["time"] == 0).all()
    assert (begin[0]["previous_action"] == 3).all()
    assert (again[0]["time"] == 0.5).all()


def test_a_new_episode_on_the_same_step():
    envs = CPOMDPVectorEnv(LightDark(2), 4, flat=True, seed=0, autoreset_mode="SameStep")
    _, _, last = play(envs, [np.full(4, 1)] * 2)
    observations, _, terminated, _, info = last
    assert terminated.all()
    assert (observations[:, 4] == 0).all()
    assert (np.stack(info["final_obs"])[:, 4] == 1).all()
    assert (info["final_info"]["state"] > info["state"]).all()


def test_the_end_can_be_left_to_the_caller():
    envs = CPOMDPVectorEnv(LightDark(1), 2, autoreset_mode=AutoresetMode.DISABLED)
    play(envs, [[0, 1]])
    with pytest.raises(ResetNeeded, match="over after 1 steps"):
        envs.step([0, 1])
    envs.reset()
    envs.step(["left", "right"])


def test_gymnasiums_wrappers_around_a_batch():
    model = LightDark(3)
    envs = RecordEpisodeStatistics(CPOMDPVectorEnv(model, 5, likelihood="ekf"))
    calls = play(envs, [np.full(5, 2)] * 3, seed=0)
    returns = np.sum([call[1] for call in calls[1:]], 0)
    np.testing.assert_allclose(calls[-1][-1]["episode"]["r"], returns)
    _, infos = DictInfoToList(CPOMDPVectorEnv(Beacons(), 2)).reset(seed=0)
    assert infos[1]["state"]["position"].shape == (2,)


# ---- episodes that end -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("program", ENDING)
def test_episodes_end_inside_their_spaces(program, flat):
    """They end where the model ends them, or at the horizon; the return is what was earned, discounted."""
    model = program()
    env = CPOMDPEnv(model, flat=flat, seed=0)
    env.action_space.seed(0)
    lengths = set()
    for _ in range(30):
        assert env.reset()[0] in env.observation_space
        earned, over, t = 0.0, False, 0
        while not over:
            observation, reward, over, truncated, info = env.step(env.action_space.sample())
            earned, t = earned + model.discount**t * reward, t + 1
            assert observation in env.observation_space
            assert over == (info["ended"] or t == model.horizon)
            assert not truncated
            assert info["return"] == pytest.approx(earned)
            assert info["discount"] == model.discount
        lengths.add((t, info["ended"]))
        with pytest.raises(ResetNeeded, match=f"over after {t} steps"):
            env.step(env.action_space.sample())
    assert {True, False} == {ended for _, ended in lengths}
    assert model.horizon in {t for t, _ in lengths}


@pytest.mark.parametrize("program", [Reef, Sail, Awake])
def test_a_batch_that_ends_is_distributed_as_in_simulate(program):
    model, B = program(), 4000
    episodes = simulate(model, RandomPolicy(model.actions), B, seed=0)
    envs = CPOMDPVectorEnv(model, B, seed=1)
    envs.action_space.seed(2)
    _, info = envs.reset()
    contexts, alive, lengths = info["context"], np.ones(B, bool), np.zeros(B)
    returns, ended, states = np.zeros(B), np.zeros(B, bool), np.zeros(B)
    for t in range(model.horizon):
        actions = envs.action_space.sample()
        _, rewards, over, _, info = envs.step(actions)
        lengths += alive
        returns += np.where(alive, model.discount**t * rewards, 0.0)
        ended |= alive & info["ended"]
        states = np.where(alive, info["state"], states)
        alive &= ~over
    last = episodes.states.gather(1, episodes.lengths[:, None])
    theirs = (episodes.observations["ended"].sum(1), episodes.lengths, episodes.returns, last)
    for mine, other, what in zip(
        (ended, lengths, returns, states), theirs, ["ended", "length", "return", "state"], strict=True
    ):
        assert_alike(mine, other, what)
        assert_alike(mine * contexts, np.asarray(other).reshape(B) * episodes.contexts.numpy(), what)


def one_by_one(model, likelihood, flat, actions, mode):
    """What every call of `step` returns for each row, by single environments: written by hand.

    Of each call: observation, reward, whether it is over, info, and the last observation and info if an
    episode is over and another begins in the same call.
    """
    rows = []
    for row, prior in enumerate(np.eye(4)):
        env = CPOMDPEnv(model, prior=prior, likelihood=likelihood, flat=flat, seed=0)
        calls, over = [], False
        observation, info = env.reset()
        for action in actions[:, row]:
            final, began = None, over
            if over and mode is AutoresetMode.DISABLED:
                env.reset()  # by the caller, between the calls
            if began and mode is AutoresetMode.NEXT_STEP:
                (observation, info), reward, over = env.reset(), 0.0, False
            else:
                observation, reward, over, _, info = env.step(action)
            if over and mode is AutoresetMode.SAME_STEP:
                final = observation, info
                observation, info = env.reset()
                calls.append((observation, reward, True, info, final))
                over = False
            else:
                calls.append((observation, reward, over, info, final))
        rows.append(calls)
    return list(zip(*rows, strict=True))  # by call, then by row


def assert_row(batch, row, single):
    """Row `row` of observations or infos in a batch is that of the single environment."""
    if isinstance(single, dict):
        for name, part in single.items():
            assert_row(batch[name], row, part)
            assert batch.get(f"_{name}", np.ones(4, bool))[row]
    else:
        np.testing.assert_array_equal(batch[row], single)


@pytest.mark.slow
@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize(
    ("program", "likelihood", "flat"),
    [(Fuse, "exact", False), (Fuse, None, True), (Lit, None, False), (Lit, None, True)],
)
def test_every_row_ends_and_begins_anew_as_if_it_were_alone(program, likelihood, mode, flat):
    """Contexts are those of the rows: ends after 1 and 3 steps, at the horizon, and by the horizon alone."""
    model, rng = program(), np.random.default_rng(0)
    actions = rng.random((17, 4, 1), np.float32) if model.box else rng.integers(2, size=(17, 4))
    settings = dict(likelihood=likelihood, flat=flat)
    envs = CPOMDPVectorEnv(model, 4, prior=np.eye(4), autoreset_mode=mode, **settings)
    envs.reset(seed=0)
    done, ends = np.zeros(4, bool), []
    for k, singles in enumerate(one_by_one(model, likelihood, flat, actions, mode)):
        if mode is AutoresetMode.DISABLED and done.any():
            with pytest.raises(ResetNeeded, match="is over after"):
                envs.step(actions[k])
            _, info = envs.reset(options={"reset_mask": done})
            assert np.array_equal(info["_context"], done)
        observations, rewards, done, truncated, info = envs.step(actions[k])
        assert observations in envs.observation_space
        assert not truncated.any()
        finals = [row for row, single in enumerate(singles) if single[-1] is not None]
        assert np.array_equal(info.get("_final_obs", np.zeros(4, bool)).nonzero()[0], finals)
        for row, (observation, reward, over, known, final) in enumerate(singles):
            assert_row(observations, row, observation)
            assert_row(info, row, known)
            assert (rewards[row], done[row]) == (reward, over)
            if final is not None:
                assert same(info["final_obs"][row], final[0])
                assert_row(info["final_info"], row, final[1])
        ends.append(done.astype(int))
    wait = 1 if mode is AutoresetMode.NEXT_STEP else 0  # a call that only begins anew
    lengths = (1, 3, 5, 5)
    expected = [[int(k % (n + wait) == n - 1) for n in lengths] for k in range(17)]
    assert np.array_equal(ends, expected)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("program", [Fuse, Lit])
def test_a_batch_that_ends_is_what_gymnasium_makes_of_single_ones(program, flat, mode):
    """All that is returned, value by value and type by type: nothing is random."""
    model = program()
    made = CPOMDPVectorEnv(model, 4, prior=np.eye(4), flat=flat, autoreset_mode=mode)
    single = [lambda prior=prior: CPOMDPEnv(model, prior=prior, flat=flat) for prior in np.eye(4)]
    theirs = SyncVectorEnv(single, autoreset_mode=mode)
    made.action_space.seed(0)
    actions = [made.action_space.sample() for _ in range(12)]
    for call, other in zip(play(made, actions, seed=0), play(theirs, actions, seed=0), strict=True):
        assert alike(call, other)


def alike(one, other):
    """The same, also in arrays of observations that are dicts."""
    if isinstance(one, np.ndarray) and one.dtype == object and one.dtype == other.dtype:
        return same(list(one), list(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return same(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize(("program", "likelihood"), [(Reef, "exact"), (Awake, "exact"), (Sail, "ekf")])
def test_posteriors_are_the_filters_over_ends_and_new_beginnings(program, likelihood, mode):
    """Of all rows' episodes, noted down one by one, whole or not."""
    model, B = program(), 5
    prior = np.random.default_rng(1).dirichlet(np.ones(2), B)
    envs = CPOMDPVectorEnv(model, B, likelihood=likelihood, prior=prior, autoreset_mode=mode)
    sites = envs.encoding.sites
    envs.action_space.seed(0)

    def noted(observation, info, row=None):
        """The observation and the posterior of one row."""
        seen = observation if row is None else {name: part[row] for name, part in observation.items()}
        values = {
            name: (seen[name].reshape(site.shape), bool(seen[f"{name}_seen"])) for name, site in sites.items()
        }
        at = slice(None) if row is None else row
        return values, info["ended"][at], info["posterior"][at]

    observation, info = envs.reset(seed=3)
    lives = [[[(None, *noted(observation, info, row))]] for row in range(B)]
    anew = np.zeros(B, bool)
    for _ in range(14):
        actions = envs.action_space.sample()
        observation, _, over, _, info = envs.step(actions)
        for row in range(B):
            if anew[row]:  # by the call before
                lives[row].append([(None, *noted(observation, info, row))])
                continue
            if over[row] and mode is AutoresetMode.SAME_STEP:
                last = {name: info["final_info"][name][row] for name in ("ended", "posterior")}
                values, *_ = noted(info["final_obs"][row], {"ended": [0], "posterior": [0]})
                lives[row][-1].append((actions[row], values, last["ended"], last["posterior"]))
                lives[row].append([(None, *noted(observation, info, row))])
            else:
                lives[row][-1].append((actions[row], *noted(observation, info, row)))
        anew = over & (mode is AutoresetMode.NEXT_STEP)
    lengths = set()
    for row, episodes in enumerate(lives):
        assert len(episodes) > 2
        for first, *steps in episodes:
            if not steps:
                continue
            lengths.add((len(steps), bool(steps[-1][2])))
            extra = {}
            if model.initial_observation:
                extra["initial_observations"] = {name: np.array([first[1][name][0]]) for name in sites}
            values = {name: np.array([[step[1][name][0] for step in steps]]) for name in sites}
            seen = {name: np.array([[step[1][name][1] for step in steps]]) for name in sites}
            ended = np.array([[step[2] for step in steps]])
            recorded = Episodes.from_arrays(
                model,
                np.array([[step[0] for step in steps]]),
                {**values, "ended": ended},
                observed={**seen, "ended": np.ones_like(ended)},
                **extra,
            )
            found = as_backend(likelihood).run(model, recorded, seed=0).posterior(torch.tensor(prior[row]))[0]
            posteriors = np.stack([first[3], *(step[3] for step in steps)])
            np.testing.assert_allclose(posteriors, found, rtol=1e-5, atol=1e-7)
    assert len({ended for _, ended in lengths}) == 2
    assert len({n for n, _ in lengths}) > 2
