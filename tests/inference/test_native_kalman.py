"""Compiled Kalman filters against the eager ones."""

from __future__ import annotations

import gc
import weakref
from dataclasses import fields, replace
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import constraints
from pyro.nn import PyroParam

from cpomdp_ppl import CPOMDP, RandomPolicy, simulate
from cpomdp_ppl.errors import DensityError, ObservationError, UnsupportedModelError
from cpomdp_ppl.inference import native_kalman
from cpomdp_ppl.inference.extended import ExtendedKalmanFilter
from cpomdp_ppl.inference.unscented import UnscentedKalmanFilter
from cpomdp_ppl.models import Beacons, LightDark, LineGrid
from cpomdp_ppl.state import leaves
from examples.extending.model import Heater
from tests.conftest import fixed_actions
from tests.inference.test_kalman import Constant, Curved, Doubles, Echo, LinearGaussian, ragged, times
from tests.programs import EyesOpen, Learnable, Plates, Walk

pytestmark = pytest.mark.slow  # a compiler takes a moment

FILTERS = {
    "ekf": ExtendedKalmanFilter(engine="native"),
    "ukf": UnscentedKalmanFilter(engine="native"),
    "ukf, narrow": UnscentedKalmanFilter(alpha=0.5, beta=2.0, kappa=1.0, engine="native"),
}
README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(params=FILTERS)
def backend(request):
    return FILTERS[request.param]


def native(backend, model, episodes, moments=True):
    """What the kernel itself finds, with nothing to fall back on."""
    found = backend.kernel(model).run(backend.settings(), model, episodes, moments)
    assert found is not None
    return found


def assert_same(found, expected, rtol=1e-8):
    """Two results agree in types and shapes, and up to rounding in numbers."""
    for field in fields(found):
        mine, theirs = getattr(found, field.name), getattr(expected, field.name)
        assert (mine is None) == (theirs is None), field.name
        if mine is not None:
            for (name, a), (other, b) in zip(leaves(mine), leaves(theirs), strict=True):
                assert (name, a.shape, a.dtype, a.requires_grad) == (other, b.shape, b.dtype, b.requires_grad)
                close = rtol if a.dtype == torch.float64 else max(rtol, 2e-6)
                torch.testing.assert_close(a, b, rtol=close, atol=close, msg=lambda m, n=name: f"{n}: {m}")


def compare(backend, model, episodes, rtol=1e-8):
    """Run both engines."""
    found = native(backend, model, episodes)
    expected = replace(backend, engine="eager").run(model, episodes)
    assert_same(found, expected, rtol)
    assert native(backend, model, episodes, moments=False).state_mean is None
    return found


# ------------------------------------------------------------------------------------------------ models


def ferry():
    """The README's model."""
    text = README.read_text(encoding="utf-8")
    names = {"__name__": "ferry"}
    exec(text.split("```python\n")[1].split("\n\n\nmodel = ")[0], names)
    return names["Ferry"]()


class Tilted(CPOMDP):
    """A vector and a number; all noise is correlated, and its scale depends on the state."""

    contexts, actions, horizon = 2, 2, 5

    def scale(self, position):
        scale = torch.eye(2).to(position) * (0.5 + position.square().sum(-1) / 20)[..., None, None]
        return scale + 0.1 * torch.tensor([[0.0, 0.0], [1.0, 0.0]]).to(position)

    def initial(self, context):
        covariance = torch.tensor([[1.0, 0.4], [0.4, 0.5]])
        return {
            "position": pyro.sample("p", dist.MultivariateNormal(torch.zeros(2), covariance)),
            "speed": pyro.sample("v", dist.Normal(1.0 * context, 0.3)),
        }

    def transition(self, state, action, context):
        position = state["position"] + 0.1 * state["speed"][..., None] * torch.ones(2).to(state["position"])
        fn = dist.MultivariateNormal(position, scale_tril=self.scale(position))
        return {
            "position": pyro.sample("p", fn),
            "speed": pyro.sample("v", dist.Normal(state["speed"].tanh() + action, 0.2)),
        }

    def observation(self, state, action, context):
        position = state["position"]
        fn = dist.MultivariateNormal(position.sin(), scale_tril=0.3 * self.scale(position))
        pyro.sample("where", fn.mask(action == 0))
        pyro.sample("speed", dist.Normal(state["speed"] * (1 + context), 0.4))

    def reward(self, state, action, context):
        return state["position"].sum(-1) > state["speed"] + 0.03


class Sensors(Walk):
    """Three sensors side by side, of which an action shows some; noise on two of three numbers alone."""

    max_plate_nesting = 1
    actions = 3

    def initial(self, context):
        return {"x": pyro.sample("x", dist.Normal(torch.zeros(1), 1.0)), "gone": torch.tensor([2.0])}

    def transition(self, state, action, context):
        moved = pyro.sample("x", dist.Normal(0.9 * state["x"] + action, 1.0 + context))
        return {"x": moved, "gone": state["gone"] * 0.5}

    def observation(self, state, action, context):
        sensors = torch.arange(3)
        with pyro.plate("sensors", 3):
            mean = state["x"] * (1.0 + sensors) + state["gone"]
            pyro.sample("z", dist.Normal(mean, 0.5 + 0.1 * sensors).mask(sensors <= action))

    def reward(self, state, action, context):
        return state["x"] - action


class Many(CPOMDP):
    """Too many contexts and actions for code of their own; all numbers come from tables."""

    contexts, actions, horizon = 6, 8, 6

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.register_buffer("shift", torch.randn(6, 8, generator=draw))
        self.turn = [torch.randn(6, 2, 2, generator=draw) * 0.5]

    def initial(self, context):
        return pyro.sample("x", dist.Normal(self.shift[context][..., :2], 1.0).to_event(1))

    def transition(self, state, action, context):
        mean = times(self.turn[0][context], state) + self.shift[context, action][..., None]
        return pyro.sample("x", dist.Normal(mean, 0.5).to_event(1))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state[..., 0], 0.5 + action / 8).mask(action % 2 == 0))

    def reward(self, state, action, context):
        return state[..., 1] * self.shift[context, action]


class Cornered(Walk):
    """Means lie exactly on corners of clamped functions, where torch has conventions."""

    def initial(self, context):
        return pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))

    def transition(self, state, action, context):
        noise = pyro.sample("e", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        a, b, c = (state + 0.3 * noise).unbind(-1)
        a, b = a.clamp(min=0), b.relu()
        return torch.stack([a, b, torch.maximum(c, torch.zeros_like(c)) + c.abs()], -1)

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state.clamp(-1, 1), 1.0).to_event(1))

    def reward(self, state, action, context):
        return state.amax(-1)


class Numbered(Walk):
    """Double precision of its own."""

    def __init__(self):
        super().__init__()
        self.step = torch.tensor(0.7, dtype=torch.float64)

    def initial(self, context):
        return pyro.sample("x", dist.Normal(self.step, 1.0))

    def transition(self, state, action, context):
        return state * self.step + action  # no noise at all

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, self.step))


class Learned(Walk):
    """A constrained parameter, a plain one, and a layer."""

    def __init__(self):
        super().__init__()
        self.scale = PyroParam(torch.tensor(0.5), constraints.positive)
        self.drift = torch.nn.Parameter(torch.tensor(0.25))
        self.layer = torch.nn.Linear(1, 1)

    def transition(self, state, action, context):
        bent = self.layer(state[..., None])[..., 0].tanh()
        return pyro.sample("x", dist.Normal(state + self.drift * action + bent, self.scale))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, self.scale * 2))


SERVED = {
    "LightDark": LightDark,
    "Beacons": Beacons,
    "Ferry": ferry,
    "Heater": Heater,
    "Tilted": Tilted,
    "Sensors": Sensors,
    "Many": Many,
    "Cornered": Cornered,
    "Numbered": Numbered,
    "Learned": Learned,
    "Learnable": Learnable,
    "Plates": Plates,
    "EyesOpen": EyesOpen,
    "Walk": Walk,
    "Echo": Echo,
    "Curved": Curved,
    "Constant": Constant,
    "Doubles": Doubles,
    "LinearGaussian, singular": lambda: LinearGaussian(2),
    "LinearGaussian, direct": lambda: LinearGaussian(3),
    "LinearGaussian, a dict": lambda: LinearGaussian(7),
}


def some_episodes(model, num_episodes=12, seed=3):
    """Not of a robot between light and dark, where rounding would decide which of the two it is in."""
    policy = RandomPolicy(model.num_actions)
    if isinstance(model, LightDark):
        policy = fixed_actions(1, *[2, 1, 2, 2, 0] * 4)
    return simulate(model, policy, num_episodes, seed=seed)


@pytest.mark.parametrize("name", SERVED)
def test_both_engines_agree(backend, name):
    model = SERVED[name]()
    compare(backend, model, some_episodes(model))


@pytest.mark.parametrize("name", ["Beacons", "Tilted", "Sensors", "EyesOpen", "LinearGaussian, a dict"])
def test_ragged_episodes_that_miss_something(backend, name):
    model = SERVED[name]()
    episodes = ragged(model, 5, 12)
    found = compare(backend, model, episodes)
    over = torch.arange(model.horizon) >= episodes.lengths[:, None]
    assert over.any()
    assert not found.increments[over].any()


@pytest.mark.parametrize("reward_points", [1, 7, 300])
def test_points_of_the_reward(backend, reward_points):
    backend = replace(backend, reward_points=reward_points)
    compare(backend, Tilted(), simulate(Tilted(), RandomPolicy(2), 4, seed=0))


# ------------------------------------------------------------------------------------------- what changes


def test_learned_constants_may_change_without_a_compiler(backend, monkeypatch):
    model = Learned()
    episodes = simulate(model, RandomPolicy(2), 6, seed=1)
    before = compare(backend, model, episodes)
    monkeypatch.setattr(native_kalman, "compiled", lambda source: pytest.fail("compiled again"))
    model.scale = torch.tensor(0.9)
    with torch.no_grad():
        model.drift.add_(1.0)
        model.layer.weight.fill_(0.3)
    after = compare(backend, model, episodes)
    assert not torch.allclose(before.increments, after.increments)


def test_the_param_store_counts(backend):
    model = Learned()
    episodes = simulate(model, RandomPolicy(2), 6, seed=1)
    before = native(backend, model, episodes)
    with pyro.get_param_store().scope():
        pyro.param("scale", torch.tensor(1.5), constraint=constraints.positive)
        after = native(backend, model, episodes)
        # A module takes what the store has in the precision that it has there.
        assert_same(after, replace(backend, engine="eager").run(model, episodes), rtol=1e-6)
    assert not torch.allclose(before.increments, after.increments)


@pytest.mark.parametrize("engine", ["native", "eager"])
def test_filters_leave_the_parameters_of_a_model_alone(backend, engine):
    model = Learned()
    before = dict(model.named_parameters())
    replace(backend, engine=engine).run(model, simulate(model, RandomPolicy(2), 6, seed=1))
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)


@pytest.mark.parametrize("name", ["a number", "a buffer", "a tensor in a list"])
def test_what_a_model_is_made_of_may_change(backend, name):
    model = Many() if name != "a number" else Beacons()
    episodes = simulate(model, RandomPolicy(model.num_actions), 6, seed=1)
    before = compare(backend, model, episodes)
    if name == "a number":
        model.stride = 0.3
    elif name == "a buffer":
        model.shift[0, 0] += 1
        model.shift[:, 1:] += 0.5
    else:
        model.turn[0] *= 1.5
    after = compare(backend, model, episodes)
    assert not torch.allclose(before.expected_reward, after.expected_reward)


def test_other_constants_need_no_compiler(monkeypatch):
    backend, text = ExtendedKalmanFilter(), []
    for stride in (0.8, 0.7):
        text.append(backend.kernel(Beacons(stride=stride, radius=1.1 + stride)).source)
    assert text[0] == text[1]


# --------------------------------------------------------------------------------- threads and batches


def test_results_are_the_same_bits_however_episodes_are_shared_out(backend, monkeypatch):
    model = Tilted()
    episodes = ragged(model, 2, 9)
    whole = native(backend, model, episodes)
    monkeypatch.setattr(native_kalman, "WORK_FOR_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    threads = native(backend, model, episodes)
    assert_same(threads, whole, rtol=0.0)
    for b in range(9):
        alone = native(backend, model, episodes[b])
        assert torch.equal(alone.increments[0], whole.increments[b])
        assert torch.equal(alone.state_variance["position"][0], whole.state_variance["position"][b])


def test_nothing_is_drawn_from_generators():
    model, state = LightDark(), torch.get_rng_state()
    episodes = simulate(model, RandomPolicy(3), 5, seed=0)
    result = ExtendedKalmanFilter().run(model, episodes)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(ExtendedKalmanFilter().attempt(model, episodes, seed=5), result, rtol=0.0)


# ----------------------------------------------------------------------------------------------- errors


def test_what_the_program_masks_was_not_observed(backend):
    model = LightDark()
    episodes = simulate(model, RandomPolicy(3), 5, seed=0)
    flags = torch.ones_like(episodes.observed["z"])
    shown = replace(episodes, observed={"z": flags})
    with pytest.raises(ObservationError, match=r"site 'z' at time \d of episode \d: it was observed, but"):
        backend.run(model, shown)


class Exact(Walk):
    """Seen twice without noise: one number too many."""

    def observation(self, state, action, context):
        pyro.sample("z", dist.Delta(torch.stack([state, state], -1), event_dim=1))


def test_a_covariance_that_is_none(backend):
    episodes = simulate(Exact(), RandomPolicy(2), 5, seed=0)
    with pytest.raises(DensityError, match=r"time 1 of episode 0 in context .* is not positive definite"):
        backend.run(Exact(), episodes)


class Wild(Walk):
    """A scale that becomes negative."""

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state, 1.0 - 0.7 * action))

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 1.0 - 1.5 * action))


def test_scales_that_are_none(backend):
    episodes, backend = simulate(Walk(), RandomPolicy(2), 5, seed=0), replace(backend, engine="auto")
    with pytest.raises(DensityError, match=r"observation: site 'z' \(Normal\) has scale = -0.5"):
        backend.run(Wild(), episodes)


class Runaway(Walk):
    """A state that leaves the reals."""

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal((state + 7).exp().exp(), 1.0))


def test_states_that_leave_the_reals(backend):
    episodes = simulate(Walk(), RandomPolicy(2), 5, seed=0)
    with pytest.raises(DensityError):
        backend.run(Runaway(), episodes)


def test_episodes_of_another_model(backend):
    episodes = simulate(Walk(), RandomPolicy(2), 5, seed=0)
    with pytest.raises(ObservationError, match=r"expected the sites \['echo', 'z'\], got \['z'\]"):
        backend.run(Echo(), episodes)
    with pytest.raises(ValueError, match="seed"):
        backend.run(Walk(), episodes, seed=-1)


def test_what_others_depend_on_was_not_seen(backend):
    """Then the eager filter has to average over it."""
    episodes = simulate(Echo(), RandomPolicy(2), 5, seed=0)
    z = episodes.observed["z"].clone()
    z[2, 1] = False
    missed = replace(episodes, observed={**episodes.observed, "z": z})
    assert backend.kernel(Echo()).run(backend.settings(), Echo(), missed, True) is None
    expected = replace(backend, engine="eager").run(Echo(), missed)
    assert torch.equal(backend.run(Echo(), missed).increments, expected.increments)


# ------------------------------------------------------------------------------------------- what is refused


class Clicks(Walk):
    """Seen by a click, too."""

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 1.0))
        pyro.sample("click", dist.Bernoulli(logits=state))


class Glimpse(Walk):
    """Seen only on the right: nobody can say of a Gaussian whether it is."""

    def observation(self, state, action, context):
        pyro.sample("z", dist.Normal(state, 1.0).mask(state > 0))


class Branching(Walk):
    """Looks at its state."""

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state if bool((state > -1e9).all()) else -state, 1.0))


class Heavy(Walk):
    """Noise that is not Gaussian."""

    def transition(self, state, action, context):
        return pyro.sample("x", dist.StudentT(3.0, state, 1.0))


class Mixed(Walk):
    """Insists on single precision, which does not mix with double."""

    def transition(self, state, action, context):
        turned = (torch.ones(1, 1, dtype=torch.float32) @ state[..., None, None])[..., 0, 0]
        return pyro.sample("x", dist.Normal(turned, 1.0))


REFUSED = {
    "Clicks": (Clicks, "observation .*site 'click' is discrete"),
    "Glimpse": (Glimpse, "whether something is seen depends on the state"),
    "Branching": (Branching, "transition .*looks at a value"),
    "Heavy": (Heavy, "site 'x' is StudentT"),
    "Mixed": (Mixed, "RuntimeError: expected"),
    "LineGrid": (LineGrid, "LineGrid: the state is torch.int64"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_have_no_kernel(backend, name):
    kind, message = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=f"{kind.__name__} cannot be compiled: .*{message}"):
        backend.kernel(kind())


@pytest.mark.parametrize("kind", [Clicks, Branching, Mixed], ids=lambda kind: kind.__name__)
def test_the_eager_engine_serves_them(backend, kind):
    model = kind()
    episodes = simulate(model, RandomPolicy(2), 4, seed=0)
    results = [replace(backend, engine=engine).run(model, episodes) for engine in ("auto", "eager")]
    assert_same(*results, rtol=0.0)


class Stopped(Walk):
    """Half of it is not differentiated."""

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(state / 2 + state.detach() / 2, 1.0))


class Silent(Walk):
    """Likewise."""

    def observation(self, state, action, context):
        with torch.no_grad():
            pyro.sample("z", dist.Normal(state * 2, 1.0))


class Straight(torch.autograd.Function):
    """A step that counts as a line."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, slope):
        return slope


class Rounded(Walk):
    """A derivative of its own."""

    def transition(self, state, action, context):
        return pyro.sample("x", dist.Normal(Straight.apply(state), 1.0))


@pytest.mark.parametrize("kind", [Stopped, Silent, Rounded], ids=lambda kind: kind.__name__)
def test_derivatives_of_ones_own_are_left_to_torch(kind):
    model = kind()
    with pytest.raises(UnsupportedModelError, match="derivative"):
        ExtendedKalmanFilter(engine="native").kernel(model)
    compare(UnscentedKalmanFilter(engine="native"), model, simulate(model, RandomPolicy(2), 4, seed=0))


def test_engines_have_names(backend):
    with pytest.raises(ValueError, match="engine"):
        replace(backend, engine="fast")


@pytest.mark.parametrize("kind", [LightDark, Beacons, Learned], ids=lambda kind: kind.__name__)
def test_a_model_may_go(backend, kind):
    model = kind()
    assert backend.kernel(model) is backend.kernel(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
