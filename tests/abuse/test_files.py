"""Damaged and hostile files: only typed errors, nothing is ever run, and nothing wrong passes for right."""

from __future__ import annotations

import copy
import io
import json
import pickle
import shutil
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from cpomdp_ppl import Episodes, EpisodesFileError, RandomPolicy, simulate
from cpomdp_ppl.experiments.files import CheckpointError
from cpomdp_ppl.models import LineGrid
from cpomdp_ppl.state import leaves
from solvers import cids
from tests.abuse.effort import TRIED, times
from tests.programs import Dice

MODEL = LineGrid(horizon=2)


def fit(directory):
    return cids.fit(
        MODEL, likelihood="exact", iterations=2, batch_size=8, seed=0, progress=False, checkpoint=directory
    )


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A directory with every kind of file."""
    path = tmp_path_factory.mktemp("good")
    simulate(Dice(), RandomPolicy(3), 5, seed=0).save(path / "episodes.npz")
    fit(path).save(path)
    return path


def found(directory: Path, file: str) -> Path:
    """A file by its name, or weights, whose name says what is in them."""
    return next(directory.glob("policy-*.pt")) if file == "weights" else directory / file


@pytest.fixture
def place(good, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(good, tmp_path / "copy"))


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """Cut, flipped, overwritten, doubled, or something else entirely."""
    kind, i, j = rng.integers(7), *sorted(rng.integers(0, len(data), 2))
    content = np.frombuffer(data, np.uint8).copy()
    if kind == 0:
        return data[:i]
    if kind == 1:
        return data[:i] + data[j:]
    if kind == 2:
        return data[:j] + data[i:]
    if kind == 3:
        return rng.bytes(int(rng.integers(0, 2000)))
    if kind == 4:
        j = min(j, i + 32)
        content[i:j] = np.frombuffer(rng.bytes(j - i), np.uint8)
        return content.tobytes()
    for place in rng.integers(0, len(data), rng.integers(1, 6)):
        content[place] ^= 1 << rng.integers(8)
    return content.tobytes()


def weights(solution):
    return dict(solution.policy.state_dict())


def read_episodes(directory):
    return Episodes.load(directory / "episodes.npz")


def read_solution(directory):
    return cids.load(directory, MODEL)


READERS = {
    "episodes.npz": (read_episodes, EpisodesFileError),
    "weights": (read_solution, ValueError),  # ours: CheckpointError, or `invalid`
    "solution.json": (read_solution, ValueError),
    "checkpoint.pt": (fit, ValueError),
}


def attempt(directory, file):
    """What was read, or None with a typed error."""
    read, typed = READERS[file]
    TRIED[f"files fuzzed: {file}"] += 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return read(directory)
        except typed as error:
            proper = type(error) in (EpisodesFileError, CheckpointError) or ": expected " in str(error)
            if not proper:
                raise AssertionError(f"{file}: a bare {type(error).__name__}: {error}") from error
            return None


def fault_of(directory, file, change) -> list[str]:
    """What went wrong in reading a changed file, if it was not refused properly."""
    try:
        attempt(directory, file)
    except Exception as error:
        return [f"{change}: {type(error).__name__}: {str(error).splitlines()[0]}"]
    return []


def tensors(content) -> dict[str, torch.Tensor]:
    if isinstance(content, Episodes):
        parts = {**vars(content), "discount": torch.tensor(content.discount)}.items()
        return {f"{f}/{name}": leaf for f, part in parts if part is not None for name, leaf in leaves(part)}
    return weights(content)


@pytest.mark.parametrize("file", ["episodes.npz", "weights", "checkpoint.pt"])
def test_damage_is_noticed(file, good, place):
    """What can still be read is what was written: both formats have checksums."""
    data = found(good, file).read_bytes()
    truth = tensors(attempt(good, file))
    for seed in range(times(60)):
        found(place, file).write_bytes(damaged(data, np.random.default_rng(seed)))
        content = attempt(place, file)
        if content is None:
            TRIED["files refused"] += 1
            continue
        read = tensors(content)
        assert set(read) == set(truth), f"seed {seed}"
        assert all(torch.equal(read[name], truth[name]) for name in truth), f"seed {seed}"


def test_damaged_settings_are_noticed_or_harmless(good, place):
    data = (good / "solution.json").read_bytes()
    for seed in range(times(60)):
        (place / "solution.json").write_bytes(damaged(data, np.random.default_rng(seed)))
        content = attempt(place, "solution.json")
        if content is not None:  # a digit of what was measured, perhaps
            assert set(weights(content)) == set(weights(read_solution(good)))
            assert torch.isclose(content.prior.sum(), content.prior.new_ones(()))


def paths(content, path=()):
    """Every place in a JSON document."""
    yield path
    if isinstance(content, dict | list):
        parts = content.items() if isinstance(content, dict) else enumerate(content)
        for key, part in parts:
            yield from paths(part, (*path, key))


OTHERS = [
    None,
    True,
    -1,
    0,
    1e308,
    float("nan"),
    float("inf"),
    10**40,
    "x",
    "",
    [],
    {},
    [[1], [1, 2]],
    {"a": 1},
]
TENSORS = [torch.zeros(3), torch.zeros(()), torch.full((2, 2), torch.nan)]


def retyped(content, path, other):
    """A copy of nested dicts and lists with one entry replaced."""
    if not path:
        return other
    changed = copy.copy(content)
    changed[path[0]] = retyped(content[path[0]], path[1:], other)
    return changed


@pytest.mark.parametrize("file", ["solution.json", "checkpoint.pt"])
def test_swapped_types(file, good, place):
    if file == "solution.json":
        content, others = json.loads((good / file).read_text()), OTHERS
    else:
        content, others = torch.load(good / file, weights_only=True), [*OTHERS[:12], *TENSORS]
    everywhere, rng = list(paths(content)), np.random.default_rng(0)
    chosen = [(path, other) for path in everywhere if len(path) == 1 for other in others]
    chosen += [
        (everywhere[rng.integers(len(everywhere))], others[rng.integers(len(others))])
        for _ in range(times(60))
    ]
    faults: list[str] = []
    for path, other in chosen:
        changed = retyped(content, path, other)
        if file == "solution.json":
            (place / file).write_text(json.dumps(changed))
        else:
            torch.save(changed, place / file)
        faults += fault_of(place, file, f"{path} = {other!r}")
    assert not faults, "\n".join(faults)


class Payload:
    """Unpickled, it creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


def hostile_pickles(marker: Path, good: bytes) -> list[bytes]:
    """The payload as such, inside an array, inside a torch archive, and in place of its pickle."""
    plain = pickle.dumps(Payload(marker))
    inside = io.BytesIO()
    torch.save({"weight": torch.zeros(2), "payload": Payload(marker)}, inside)
    old = io.BytesIO()
    torch.save({"payload": Payload(marker)}, old, _use_new_zipfile_serialization=False)
    array = io.BytesIO()
    np.savez(array, format=np.array("cpomdp_ppl.Episodes 1"), actions=np.array([Payload(marker)], object))
    bare = io.BytesIO()
    np.save(bare, np.array([Payload(marker)], object), allow_pickle=True)
    swapped = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good)) as before, zipfile.ZipFile(swapped, "w") as after:
        for name in before.namelist():
            after.writestr(name, plain if name.endswith((".pkl", "actions.npy")) else before.read(name))
    return [plain, *(file.getvalue() for file in (inside, old, array, bare, swapped))]


@pytest.mark.parametrize("file", ["episodes.npz", "weights", "checkpoint.pt"])
def test_nothing_in_a_file_is_run(file, good, place, tmp_path):
    marker = tmp_path / "marker"
    for content in hostile_pickles(marker, found(good, file).read_bytes()):
        found(place, file).write_bytes(content)
        assert attempt(place, file) is None
        assert not marker.exists()
    pickle.loads(pickle.dumps(Payload(marker)))
    assert marker.exists()  # so it would have been


def test_archives_that_promise_too_much(good, place):
    """Arrays that are huge, or say so, of other types, missing, doubled, or under other names."""
    with np.load(good / "episodes.npz") as archive:
        arrays = dict(archive)
    names = [name for name in arrays if name != "format"]
    kinds = (complex, "U3", "datetime64[s]", [("a", float)], ">i8", np.uint64, np.float16)
    others = [np.zeros(0), *(np.zeros((5, 4), kind) for kind in kinds), np.full((5, 4), np.nan), np.array(3)]
    others.append(np.zeros(10_000_000, np.uint8))  # 10 MB out of 10 kB
    changed = [{**arrays, name: other} for name in names for other in others]
    changed += [{key: arrays[key] for key in arrays if key != name} for name in arrays]
    changed += [
        {**arrays, extra: np.zeros(5)} for extra in ("x", "observations", "actions/a", "states/x/y", "/")
    ]
    for content in changed:
        np.savez_compressed(place / "episodes.npz", **content)
        found = attempt(place, "episodes.npz")
        if found is not None:
            found.save(place / "again.npz")  # whole enough to be written
    header = b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000, 9), }"
    with zipfile.ZipFile(place / "episodes.npz", "w") as archive:
        archive.writestr("format.npy", header.ljust(127) + b"\n")
    assert attempt(place, "episodes.npz") is None


def test_a_directory_that_hides_entries(good, place):
    """What follows `lengths` is declared to be a comment on it: states and rewards would be gone."""
    data = bytearray((good / "episodes.npz").read_bytes())
    end = data.rindex(b"PK\5\6")
    header = data.rindex(b"PK\1\2", 0, data.rindex(b"lengths.npy"))
    following = data.index(b"PK\1\2", header + 4)
    data[header + 32 : header + 34] = (end - following).to_bytes(2, "little")
    (place / "episodes.npz").write_bytes(data)
    with zipfile.ZipFile(place / "episodes.npz") as archive:
        assert archive.namelist()[-1] == "lengths.npy"
    with pytest.raises(EpisodesFileError, match="as many entries as the end of the file tells"):
        read_episodes(place)
