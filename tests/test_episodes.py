from __future__ import annotations

import io
import os
import pickle
import zipfile

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from cpomdp_ppl import Episodes, EpisodesFileError, RandomPolicy, simulate
from cpomdp_ppl.episodes import ARRAYS
from cpomdp_ppl.experiments.files import DiskFullError
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark, LineGrid
from cpomdp_ppl.state import leaves, map_state
from tests.programs import EyesOpen, Plates, Reef, Sail, Walk
from tests.solvers.machines import Mortal

NAN, INF = float("nan"), float("inf")


def equal(one: Episodes, two: Episodes) -> bool:
    if one.discount != two.discount:
        return False
    for name in ARRAYS:
        a, b = getattr(one, name), getattr(two, name)
        if (a is None) != (b is None):
            return False
        if a is not None and not all(
            x.dtype == y.dtype and torch.equal(x, y)
            for (_, x), (_, y) in zip(leaves(a), leaves(b), strict=True)
        ):
            return False
    return True


def drawn(model, B=6, seed=0):
    return simulate(model, RandomPolicy(model.actions), B, seed=seed)


def test_steps_past_the_length_count_for_nothing(model):
    """Whatever is written past the length, or where nothing was observed, the episodes are the same."""
    episodes = drawn(model)
    lengths = torch.tensor([1, 2, 3, 4, 5, episodes.horizon])
    cut = episodes.truncated(lengths)
    garbage = torch.Generator().manual_seed(0)

    def scribble(tensor, keep):
        keep = keep.reshape(keep.shape + (1,) * (tensor.dim() - keep.dim()))
        noise = torch.randint(-9, 9, tensor.shape, generator=garbage).to(tensor.dtype)
        if tensor.is_floating_point():
            noise = torch.where(noise > 5, torch.full_like(noise, NAN), noise)
        return torch.where(keep, tensor, noise)

    taken = torch.arange(episodes.horizon) < lengths[:, None]
    reached = torch.arange(episodes.horizon + 1) <= lengths[:, None]
    scribbled = Episodes(
        actions=scribble(episodes.actions, taken),
        observations={
            site: scribble(values, taken & cut.observed[site])
            for site, values in episodes.observations.items()
        },
        observed={site: torch.where(taken, seen, True) for site, seen in episodes.observed.items()},
        lengths=lengths,
        contexts=episodes.contexts,
        states=map_state(lambda leaf: scribble(leaf, reached), episodes.states),
        rewards=scribble(episodes.rewards, taken),
    )
    assert equal(scribbled, cut)
    for b, n in enumerate(lengths.tolist()):
        torch.testing.assert_close(cut.returns[b], episodes.rewards[b, :n].sum())


def test_indexing(model):
    episodes = drawn(model)
    assert len(episodes) == 6
    assert equal(episodes[2], episodes[2:3])
    assert equal(episodes[-1], episodes[[5]])
    assert equal(episodes[episodes.contexts == 0], episodes[(episodes.contexts == 0).nonzero()[:, 0]])
    assert [len(one) for one in episodes] == [1] * 6
    with pytest.raises(IndexError, match="episode 6 out of 6"):
        episodes[6]
    for index in (np.int64(2), torch.tensor(2), np.array([2]), slice(2, 3)):
        assert equal(episodes[index], episodes[2])
    for index in ([], slice(4, 2), torch.zeros(6, dtype=torch.bool)):
        with pytest.raises(IndexError, match="no episode out of 6 is selected"):
            episodes[index]
    for index in ([[0, 1]], "a", None, 1.5):
        with pytest.raises(IndexError, match="indices in one axis"):
            episodes[index]
    with pytest.raises(ValueError, match=r"lengths: expected a number, or shape \[6\], got \(2,\)"):
        episodes.truncated([1, 2])


def test_concatenation_undoes_slicing(model):
    episodes = drawn(model)
    assert equal(Episodes.concatenate([episodes[:2], episodes[2:]]), episodes)


class Reefless(Walk):
    """Shows what `Sail` shows, and takes other actions."""

    def ends(self, state, action, context):
        return state > 1


@pytest.mark.parametrize("model", [Reef(), Sail(), Mortal(2, awake=True)], ids=lambda m: type(m).__name__)
def test_episodes_that_end(model, tmp_path):
    """Cut up, put together, saved, and handed over as arrays, they stay what they are; returns by hand."""
    episodes = drawn(model, 60)
    assert len(set(episodes.lengths.tolist())) > 1
    for b, n in enumerate(episodes.lengths.tolist()):
        ended = episodes.observations["ended"][b]
        assert ended[: n - 1].sum() == 0
        assert n == model.horizon or ended[n - 1] == 1
        assert not episodes.observed["ended"][b, n:].any()
        assert episodes.observed["ended"][b, :n].all()
        by_hand = sum(model.discount**t * float(episodes.rewards[b, t]) for t in range(n))
        assert float(episodes.returns[b]) == pytest.approx(by_hand, abs=1e-5)
        assert not episodes.rewards[b, n:].any()
        assert not episodes.actions[b, n:].any()
    assert equal(Episodes.concatenate([episodes[:7], episodes[7:8], episodes[8:]]), episodes)
    shuffled = torch.randperm(60)
    assert equal(episodes[shuffled][shuffled.argsort()], episodes)
    cut = episodes.truncated(2)
    assert torch.equal(cut.lengths, episodes.lengths.clamp(max=2))
    torch.testing.assert_close(cut.returns, episodes.rewards[:, 0] + model.discount * episodes.rewards[:, 1])
    episodes.save(tmp_path / "episodes.npz")
    assert equal(Episodes.load(tmp_path / "episodes.npz"), episodes)

    first = {}
    if model.initial_observation:
        first["initial_observations"] = {"o": episodes.initial_observations["o"].numpy()}
    arrays = dict(
        observed={site: seen.numpy() for site, seen in episodes.observed.items()},
        contexts=episodes.contexts.numpy(),
        states=episodes.states.numpy(),
        rewards=episodes.rewards.numpy(),
        **first,
    )
    actions = episodes.actions.numpy().astype(float)
    actions[~episodes.alive] = NAN  # what is left there counts for nothing
    again = Episodes.from_arrays(model, actions, episodes.observations, **arrays)
    short = episodes.lengths < model.horizon
    assert equal(again, episodes)
    assert not again.alive[short, -1].any()


ENDS = [
    ([[0, 1, 0, 0], [0, 0, 0, 0]], {}, [2, 4]),
    ([[False, True, True, True], [False, False, False, True]], {}, [2, 4]),
    ([[0.0, NAN, 1.0, NAN], [1.0, NAN, NAN, NAN]], {}, [3, 1]),
    (np.ma.array([[1, 1, 0, 0], [0, 0, 1, 0]], mask=[[1, 0, 0, 0], [0, 0, 1, 0]]), {}, [2, 4]),
    ([[1, 0, 1, 0], [0, 0, 0, 0]], {"seen": [[False, True, True, True], [True] * 4]}, [3, 4]),
    ([[0, 1, 0, 0], [0, 0, 0, 0]], {"lengths": [2, 3]}, [2, 3]),  # the second was cut short
    ([[0, 1, 0, 0], [0, 0, 0, 0]], {"lengths": [1, 4]}, [1, 4]),  # and so was the first
]


@pytest.mark.parametrize(("ended", "others", "lengths"), ENDS, ids=range(len(ENDS)))
def test_episodes_are_as_long_as_their_ends_say(ended, others, lengths):
    surf, others = [[0, 1, 0, 1]] * 2, dict(others)
    if "seen" in others:
        others["observed"] = {"ended": others.pop("seen"), "surf": np.ones((2, 4), bool)}
    actions = [["left"] * 4, ["right"] * 4]
    episodes = Episodes.from_arrays(Reef(), actions, {"surf": surf, "ended": ended}, **others)
    assert episodes.lengths.tolist() == lengths
    assert episodes.observed["surf"].sum(1).tolist() == lengths


CONTRADICTIONS = [
    (
        dict(lengths=[3]),
        r"'ended'\]: expected none but at the last step.* after 2 of the 3 steps of episode 0",
    ),
    (
        dict(observations={"surf": [[0, 1, 0, 1]], "ended": [[0, 2, 0, 0]]}),
        r"'ended'\]: .*Boolean\(\), got 2",
    ),
    (dict(observations={"surf": [[0, 1, 0, 1]]}), r"observations: expected the sites \['ended', 'surf'\]"),
    (
        dict(observations={"surf": [[0, 1, 0, 1]], "ended": [0, 1, 0, 0]}),
        r"'ended'\]: expected shape \[1, 4\]",
    ),
    (dict(observations={"surf": [[0, 1, 0, 1]], "ended": [["a"] * 4]}), r"'ended'\]: expected an array"),
    (dict(lengths=[5]), "lengths: expected 1 to 4 steps"),
]


@pytest.mark.parametrize(("arguments", "message"), CONTRADICTIONS, ids=range(len(CONTRADICTIONS)))
def test_ends_that_contradict_are_named(arguments, message):
    good = dict(actions=[[0, 0, 1, 1]], observations={"surf": [[0, 1, 0, 1]], "ended": [[0, 1, 0, 0]]})
    with pytest.raises(ValueError, match=message):
        Episodes.from_arrays(Reef(), **(good | arguments))


def test_tensors_must_not_go_on_after_an_end_either():
    ended = torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    actions, seen = torch.zeros(2, 3).long(), torch.ones(2, 3).bool()
    with pytest.raises(ValueError, match="an end after 2 of the 3 steps of episode 1"):
        Episodes(actions, {"ended": ended}, {"ended": seen})
    with pytest.raises(ValueError, match="an end after 2 of the 3 steps of episode 1"):
        Episodes(actions, {"ended": ended[..., None]}, {"ended": seen[..., None]})
    Episodes(actions, {"ended": ended}, {"ended": seen}, lengths=torch.tensor([3, 2]))
    Episodes(actions, {"ended": ended}, {"ended": ended == 0})  # not seen to have ended


def test_concatenation_pads_and_keeps_what_is_known_of_all():
    long, short = drawn(LightDark(horizon=5)), drawn(LightDark(horizon=3))
    both = Episodes.concatenate([long, short])
    assert both.horizon == 5
    assert both.lengths.tolist() == [5] * 6 + [3] * 6
    assert torch.equal(both.returns, torch.cat([long.returns, short.returns]))
    unknown = Episodes(short.actions, short.observations, short.observed)
    mixed = Episodes.concatenate([long, unknown])
    assert mixed.contexts is None
    assert mixed.returns is None
    with pytest.raises(ValueError, match="parts: expected at least one batch"):
        Episodes.concatenate([])
    with pytest.raises(ValueError, match=r"parts: expected sites \['z'\]"):
        Episodes.concatenate([long, drawn(Beacons())])
    with pytest.raises(ValueError, match=r"parts: expected discount 0.8, .* got discount 1.0|expected 0.8"):
        Episodes.concatenate([drawn(Sail()), drawn(Reefless())])
    flat = type("Flat", (Reefless,), {"discount": Sail.discount})()
    with pytest.raises(
        ValueError, match=r"parts: expected \(2,\), as of the first, got actions of axes \(\)"
    ):
        Episodes.concatenate([drawn(Sail()), drawn(flat)])


@pytest.mark.parametrize("make", [LightDark, Beacons, Plates, EyesOpen, Reef, Sail])
def test_saving_and_loading(make, tmp_path):
    episodes = drawn(make()).truncated(torch.tensor([1, 2, 3, 3, 2, 1]))
    episodes.save(tmp_path / "episodes.npz")
    assert equal(Episodes.load(tmp_path / "episodes.npz"), episodes)
    assert os.listdir(tmp_path) == ["episodes.npz"]


def test_any_name_can_be_saved(tmp_path):
    names = ["left/ear", "50%", "a b", "größe", "%2F", "file"]
    values = {name: torch.full((2, 3), float(i)) for i, name in enumerate(names)}
    seen = {name: torch.ones(2, 3).bool() for name in names}
    states = {"pose/1": {"x/y": torch.zeros(2, 4)}}
    episodes = Episodes(torch.zeros(2, 3).long(), values, seen, states=states)
    episodes.save(tmp_path / "episodes.npz")
    loaded = Episodes.load(tmp_path / "episodes.npz")
    assert list(loaded.observations) == names
    assert list(loaded.states) == ["pose/1"]
    assert equal(loaded, episodes)


def test_saving_needs_no_new_numpy(tmp_path, monkeypatch):
    """Before 2.1, NumPy took `allow_pickle` for the name of an array."""
    given = {}
    monkeypatch.setattr(np, "savez_compressed", lambda file, **arrays: given.update(arrays))
    drawn(LightDark()).save(tmp_path / "episodes.npz")
    assert all(array.dtype != object for array in given.values())


@pytest.mark.skipif(os.name != "posix", reason="file modes")
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_follow_the_umask(umask, tmp_path):
    before = os.umask(umask)
    try:
        drawn(LightDark()).save(tmp_path / "episodes.npz")
    finally:
        os.umask(before)
    assert (tmp_path / "episodes.npz").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    episodes = drawn(LightDark())
    episodes.save(tmp_path / "episodes.npz")

    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(DiskFullError, match=r"the disk is full: .*episodes\.npz could"):
        drawn(LightDark(), seed=1).save(tmp_path / "episodes.npz")
    assert os.listdir(tmp_path) == ["episodes.npz"]
    assert equal(Episodes.load(tmp_path / "episodes.npz"), episodes)


def test_no_file_runs_code(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    buffer = io.BytesIO()
    np.save(buffer, np.array([Bomb()], dtype=object), allow_pickle=True)
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w") as archive:
        archive.writestr("format.npy", buffer.getvalue())
    (tmp_path / "plain.npz").write_bytes(pickle.dumps(Bomb()))
    for name in ("bomb.npz", "plain.npz"):
        with pytest.raises(EpisodesFileError):
            Episodes.load(tmp_path / name)
    assert not (tmp_path / "exploded").exists()


def test_corrupt_files_are_refused(tmp_path):
    """Cut off anywhere, or with bytes changed anywhere, a file loads as it was or not at all."""
    path = tmp_path / "episodes.npz"
    episodes = drawn(LightDark(horizon=3), B=3)
    episodes.save(path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(EpisodesFileError):
            Episodes.load(path)
    random = np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(whole)
        for place in random.integers(len(whole), size=3):
            damaged[place] ^= int(random.integers(1, 256))
        path.write_bytes(bytes(damaged))
        try:
            loaded = Episodes.load(path)
        except EpisodesFileError:
            continue
        assert equal(loaded, episodes)  # the damage was to padding


FOREIGN = [
    (dict(a=np.zeros(3)), "expected format"),
    (dict(format=np.array("something else")), "found 'something else'"),
    (dict(format=np.array("cpomdp_ppl.Episodes 1")), "actions"),
    (dict(format=np.array("cpomdp_ppl.Episodes 1"), actions=np.zeros((2, 3), int), evil=np.zeros(3)), "evil"),
    (
        dict(
            format=np.array("cpomdp_ppl.Episodes 1"), actions=np.zeros((2, 3), int), lengths=np.array([9, 1])
        ),
        "lengths",
    ),
]


@pytest.mark.parametrize(("arrays", "message"), FOREIGN)
def test_foreign_files_are_refused(arrays, message, tmp_path):
    with pytest.raises(FileNotFoundError):
        Episodes.load(tmp_path / "foreign.npz")
    np.savez(tmp_path / "foreign.npz", **arrays)
    with pytest.raises(EpisodesFileError, match=message):
        Episodes.load(tmp_path / "foreign.npz")


def test_recorded_data_round_trip(model):
    """What was simulated, handed over as plain arrays, comes back the same."""
    episodes = drawn(model)
    again = Episodes.from_arrays(
        model,
        episodes.actions.numpy(),
        {site: values.numpy() for site, values in episodes.observations.items()},
        observed={site: seen.numpy() for site, seen in episodes.observed.items()},
        contexts=episodes.contexts.numpy(),
        states=map_state(lambda leaf: leaf.numpy(), episodes.states),
        rewards=episodes.rewards.numpy(),
    )
    assert equal(again, episodes)


def test_names_and_nans_are_understood():
    episodes = Episodes.from_arrays(
        LightDark(),
        [["left", "observe", "right"], ["observe", "observe", "left"]],
        {"z": [[NAN, 0.5, NAN], [1.0, NAN, 7.0]]},
        lengths=[3, 2],
        contexts=["light left", "light right"],
        returns=[1.0, -2.0],
    )
    assert episodes.actions.tolist() == [[0, 2, 1], [2, 2, 0]]
    assert episodes.observed["z"].tolist() == [[False, True, False], [True, False, False]]
    assert episodes.observations["z"].tolist() == [[0, 0.5, 0], [1.0, 0, 0]]
    assert episodes.contexts.tolist() == [1, 0]
    assert episodes.returns.tolist() == [1.0, -2.0]


def test_recorded_data_with_plates_and_initial_observations():
    plates = Episodes.from_arrays(
        Plates(), [[0, 1]], {"z": [[[1.0, NAN, 2.0], [NAN, 1.0, 3.0]]], "battery": [[0.9, 0.8]]}
    )
    assert plates.observations["battery"].shape == (1, 2, 1)
    assert plates.observed["z"].tolist() == [[[True, False, True], [False, True, True]]]
    eyes = Episodes.from_arrays(
        EyesOpen(),
        [[0, 1]],
        {"z": [[1.0, 2.0]], "w": [[NAN, 1.0]]},
        initial_observations={"z": [0.5], "w": [NAN]},
    )
    assert eyes.initial_observations["z"].tolist() == [0.5]
    assert eyes.initially_observed["w"].tolist() == [False]
    with pytest.raises(ValueError, match="initial_observations: expected observations at time 0"):
        Episodes.from_arrays(EyesOpen(), [[0, 1]], {"z": [[1.0, 2.0]], "w": [[NAN, 1.0]]})


BAD_RECORDINGS = [
    (
        dict(actions=[[0, 3]]),
        r"actions: expected 0 to 2 \(left, right, observe\), got 3 at episode 0, step 1",
    ),
    (dict(actions=[[0, -1]]), "actions: expected 0 to 2"),
    (dict(actions=[["left", "up"]]), r"actions: expected names out of .*got \['up'\]"),
    (dict(actions=[[0.5, 1.0]]), "actions: expected integer indices or names"),
    (dict(actions=[0, 1]), "actions: expected an array of 2 axes"),
    (dict(actions=[[0] * 21], observations={"z": [[0.0] * 21]}), "actions: expected at most 20 steps"),
    (dict(observations={"y": [[0.0, 0.0]]}), r"observations: expected the sites \['z'\], got \['y'\]"),
    (dict(observations={"z": [[0.0]]}), r"observations\['z'\]: expected shape \[1, 2\], got \(1, 1\)"),
    (dict(observations={"z": [[[0.0, 1.0]] * 2]}), r"observations\['z'\]: expected shape \[1, 2\]"),
    (
        dict(observations={"z": [[0.0, NAN]]}, observed={"z": [[False, True]]}),
        "finite values where observed, got nan at episode 0, step 1",
    ),
    (dict(observations={"z": [[0.0, float("inf")]]}), "finite values where observed, got inf"),
    (dict(observed={"z": [[0, 1]]}), r"observed\['z'\]: expected booleans"),
    (dict(observed={"y": [[False, True]]}), "observed: expected the sites"),
    (dict(observed={"z": [[True]]}), r"observed\['z'\]: expected shape \[1, 2\]"),
    (dict(lengths=[3]), r"lengths: expected 1 to 2 steps in every episode, got \[3\]"),
    (dict(lengths=[0]), "lengths: expected 1 to 2 steps"),
    (dict(lengths=[1.7]), r"lengths: expected values of torch.int64, got 1.7"),
    (dict(actions=[[0, 1], [0]]), "actions: expected an array, rows all of the same length"),
    (dict(actions={"a": 1}), "actions: expected an array of real numbers"),
    (dict(observations=[[0.0, 1.0]]), r"observations: expected a mapping from the sites \['z'\]"),
    (dict(observations={"z": [[0.0], [1.0, 2.0]]}), r"observations\['z'\]: expected an array, rows all"),
    (dict(observations={"z": [[0.0, 1j]]}), r"observations\['z'\]: expected an array of real numbers"),
    (dict(observations={"z": [["a", "b"]]}), r"observations\['z'\]: expected an array of real numbers"),
    (dict(observations={"z": [[0.0, 1e300]]}), r"observations\['z'\]: expected values of torch.float32"),
    (dict(observed=[[True, True]]), "observed: expected a mapping from the sites"),
    (dict(lengths=[1, 1]), r"lengths: expected shape \[1\]"),
    (dict(contexts=[2]), "contexts: expected 0 to 1"),
    (dict(contexts=["dark"]), "contexts: expected names out of"),
    (dict(contexts=[0, 1]), r"contexts: expected shape \[1\]"),
    (dict(states=[[0.0, 1.0]]), r"states: expected shape \[1, 3\]"),
    (dict(states={"x": [[0.0, 1.0, 2.0]]}), "states: expected the components"),
    (dict(rewards=[[0.0, NAN]]), "rewards: expected finite values"),
    (dict(rewards=[[0.0]]), r"rewards: expected shape \[1, 2\]"),
    (dict(returns=[0.0, 1.0]), r"returns: expected shape \[1\]"),
    (dict(initial_observations={"z": [0.0]}), "initial_observations: expected None: this model has none"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_RECORDINGS, ids=range(len(BAD_RECORDINGS)))
def test_bad_recordings_are_named(arguments, message):
    arguments = dict(actions=[[0, 2]], observations={"z": [[NAN, 1.0]]}) | arguments
    with pytest.raises(ValueError, match=message):
        Episodes.from_arrays(LightDark(), **arguments)


BAD_TENSORS = [
    (dict(actions=torch.zeros(3).long()), r"actions: expected a tensor of shape \[B, T\]"),
    (dict(actions=torch.zeros(0, 3).long()), "actions: expected at least one episode"),
    (dict(observed={}), "observed: expected the same sites as observations"),
    (
        dict(observations={"z": torch.zeros(2, 4)}),
        r"observations\['z'\]: expected a tensor of shape \[2, 3, …\]",
    ),
    (dict(observed={"z": torch.zeros(2, 3)}), r"observed\['z'\]: expected booleans"),
    (dict(contexts=torch.zeros(3).long()), r"contexts: expected a tensor of shape \[2\]"),
    (dict(states=torch.zeros(2, 3)), r"states \(state\): expected a tensor of shape \[2, 4, …\]"),
    (dict(lengths=torch.tensor([0, 3])), "lengths: expected one step to 3 steps"),
    (dict(actions=torch.zeros(2, 3)), "actions: expected torch.int64, got torch.float32"),
    (dict(lengths=torch.ones(2)), "lengths: expected torch.int64"),
    (dict(contexts=torch.zeros(2)), "contexts: expected torch.int64"),
    (dict(contexts=torch.zeros(2, 1).long()), r"contexts: expected a tensor of shape \[2\], got \(2, 1\)"),
    (dict(rewards=torch.zeros(2, 3, 1)), r"rewards: expected a tensor of shape \[2, 3\]"),
    (dict(rewards=torch.zeros(2, 3).long()), "rewards: expected real numbers, got torch.int64"),
    (dict(observations=[1]), "observations: expected a mapping from sites to tensors"),
    (dict(observed={"z": torch.ones(2, 3, 4).bool()}), r"observed\['z'\]: expected the leading axes"),
    (
        dict(observations={"z": torch.tensor([[0.0, 1.0, 2.0], [0.0, NAN, 2.0]])}),
        r"observations\['z'\]: expected finite values where observed, got nan at episode 1, step 1",
    ),
    (
        dict(observations={"z": torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, -INF]])}),
        r"observations\['z'\]: expected finite values where observed, got -inf at episode 1, step 2",
    ),
    (
        dict(
            initial_observations={"z": torch.tensor([0.0, INF])},
            initially_observed={"z": torch.ones(2).bool()},
        ),
        r"initial_observations\['z'\]: expected finite values where observed, got inf at episode 1",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_TENSORS, ids=range(len(BAD_TENSORS)))
def test_bad_tensors_are_named(arguments, message):
    good = dict(
        actions=torch.zeros(2, 3).long(),
        observations={"z": torch.zeros(2, 3)},
        observed={"z": torch.ones(2, 3).bool()},
    )
    with pytest.raises(ValueError, match=message):
        Episodes(**(good | arguments))


def test_what_was_not_observed_need_not_be_finite():
    z = torch.tensor([[1.0, INF], [NAN, -INF]])
    episodes = Episodes(torch.zeros(2, 2).long(), {"z": z}, {"z": z == 1.0})
    assert episodes.observations["z"].tolist() == [[1.0, 0.0], [0.0, 0.0]]


class Counts(Walk):
    """Sites with integer values, and a finite state."""

    states = 3

    def initial(self, context):
        return torch.zeros_like(context)

    def transition(self, state, action, context):
        return (state + action) % 3

    def observation(self, state, action, context):
        pyro.sample("side", dist.Bernoulli(0.5))
        pyro.sample("door", dist.Categorical(torch.ones(3)))
        pyro.sample("pair", dist.Bernoulli(torch.full((2,), 0.5)).to_event(1))
        pyro.sample("number", dist.Binomial(1.0 + state, 0.5))


COUNTS = dict(side=[[0.0, 1.0]], door=[[2, 0]], pair=[[[0, 1], [1, 1]]], number=[[7.0, 0.0]])
BAD_COUNTS = [
    (dict(side=[[0.5, 1.0]]), r"observations\['side'\]: expected values within Boolean\(\), got 0.5"),
    (dict(door=[[9, 0]]), r"observations\['door'\]: expected values within IntegerInterval.* got 9"),
    (dict(door=[[0, 1.7]]), r"observations\['door'\]: expected values of torch.int64, got 1.7.*step 1"),
    (dict(pair=[[[0, 1], [1, 2]]]), r"observations\['pair'\]: expected values within .*got \[1.0, 2.0\]"),
    (dict(states=[[0, 1, 3]]), "states: expected indices 0 to 2, got 3 at episode 0, step 2"),
    (dict(states=[[0, 1, 1.5]]), "states: expected values of torch.int64, got 1.5"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_COUNTS, ids=range(len(BAD_COUNTS)))
def test_values_that_a_model_cannot_make_are_named(changes, message):
    changes = dict(changes)
    states = changes.pop("states", [[0.0, 1.0, 2.0]])
    Episodes.from_arrays(Counts(), [[0, 1]], COUNTS, states=[[0, 1, 2]])
    with pytest.raises(ValueError, match=message):
        Episodes.from_arrays(Counts(), [[0, 1]], COUNTS | changes, states=states)


@pytest.mark.parametrize("make", [LineGrid, ContextualTiger])
def test_integers_cannot_say_that_nothing_was_observed(make):
    """What was simulated holds zeros where nothing was seen; handed over without `observed`, nobody knows."""
    model = make()
    episodes = drawn(model)
    values = {site: value.numpy() for site, value in episodes.observations.items()}
    seen = {site: flags.numpy() for site, flags in episodes.observed.items()}
    site = next(iter(values))
    b, t = np.argwhere(~seen[site])[0]
    message = rf"observations\['{site}'\]: expected NaN .* or `observed`.*got 0.* at episode {b}, step {t}"
    with pytest.raises(ValueError, match=message):
        Episodes.from_arrays(model, episodes.actions, {name: x.astype(int) for name, x in values.items()})
    told = [
        {name: np.where(seen[name], x.astype(float), NAN) for name, x in values.items()},
        {name: np.ma.masked_array(x.astype(int), ~seen[name]) for name, x in values.items()},
    ]
    for given in told:
        again = Episodes.from_arrays(model, episodes.actions, given)
        assert torch.equal(again.observed[site], episodes.observed[site])
        assert torch.equal(again.observations[site], episodes.observations[site])
    # Where everybody looked there is nothing to tell.
    look = int(episodes.actions[episodes.observed[site]][0])
    ones = {name: np.ones((1, 3), int) for name in values}
    assert bool(Episodes.from_arrays(model, [[look] * 3], ones).observed[site].all())


def test_masks_by_other_sites_and_initial_observations():
    class Detector(Walk):
        horizon, initial_observation = 2, True

        def observation(self, state, action, context):
            detected = pyro.sample("detected", dist.Bernoulli(0.5))
            pyro.sample("side", dist.Categorical(torch.ones(3)).mask(detected.bool()))

    def read(first, side):
        return Episodes.from_arrays(
            Detector(),
            [[0, 1]],
            {"detected": [[1, 0]], "side": side},
            initial_observations={"detected": [0], "side": first},
        )

    assert read([NAN], [[2, NAN]]).observed["side"].tolist() == [[True, False]]
    with pytest.raises(
        ValueError, match=r"\['side'\]: .*got 1 at episode 0, step 1, where the program masks"
    ):
        read([NAN], [[2, 1]])
    with pytest.raises(ValueError, match=r"initial_observations\['side'\]: .*`initially_observed`.*got 0 at"):
        read([0], [[2, NAN]])


def test_masked_arrays_elsewhere_are_refused():
    masked = np.ma.masked_array([[0, 2]], [[True, False]])
    with pytest.raises(ValueError, match="actions: expected an array without masked entries"):
        Episodes.from_arrays(LightDark(), masked, {"z": [[NAN, 1.0]]})


def test_what_does_not_count_may_be_anything():
    observed = {site: [[True, False]] for site in COUNTS}
    given = COUNTS | dict(side=[[1.0, 0.5]], door=[[1.0, 9.5]])
    episodes = Episodes.from_arrays(
        Counts(), [[0, 1]], given, observed=observed, states=[[0, 2, NAN]], lengths=[1]
    )
    assert episodes.observations["door"].tolist() == [[1, 0]]
    assert episodes.states.tolist() == [[0, 2, 0]]


def test_rewards_keep_their_precision():
    def dtype(rewards):
        return Episodes.from_arrays(LightDark(), [[0, 2]], {"z": [[NAN, 1.0]]}, rewards=rewards).rewards.dtype

    assert dtype(np.array([[0.1, 0.2]])) == torch.float64
    assert dtype(np.array([[0.1, 0.2]], np.float32)) == torch.float32
    assert dtype([[0.1, 0.2]]) == torch.float32
    assert dtype(np.array([[1, 2]])) == torch.float32


def test_arrays_of_every_make_are_read():
    z = np.array([[0.5, 1.0], [1.5, 2.0]])
    frozen = z.copy()
    frozen.flags.writeable = False
    kinds = (">f4", np.longdouble, np.float16)
    for given in (z[:, ::-1][:, ::-1], frozen, *(z.astype(kind) for kind in kinds)):
        actions = np.array([[2, 2], [2, 2]], np.uint16)
        episodes = Episodes.from_arrays(LightDark(), actions, {"z": given})
        assert episodes.observations["z"].tolist() == z.tolist()
    with pytest.raises(ValueError, match="model: expected an instance of a CPOMDP"):
        Episodes.from_arrays(LightDark, [[0]], {"z": [[0.0]]})


def test_episodes_do_not_change_with_the_arrays_they_were_read_from():
    z = np.ones((1, 2))
    episodes = Episodes.from_arrays(LightDark(), [[2, 2]], {"z": z}, rewards=z)
    z[:] = 7.0
    assert episodes.observations["z"].tolist() == [[1.0, 1.0]]
    assert episodes.rewards.tolist() == [[1.0, 1.0]]
