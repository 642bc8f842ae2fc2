"""Fingerprints differ with values and code, are the same in every process, and are refused for the rest."""

from __future__ import annotations

import enum
import importlib.util
import math
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial, partialmethod, singledispatchmethod
from pathlib import Path
from types import MappingProxyType, MethodType

import numpy as np
import pandas as pd
import pytest
import torch

from cpomdp_ppl.experiments.files import CheckpointError
from cpomdp_ppl.experiments.fingerprint import (
    FingerprintError,
    describe,
    describe_model,
    differences,
    file_hash,
    fingerprint,
    name_of,
    require_same,
)
from cpomdp_ppl.models import ContextualTiger, LineGrid
from solvers.cids.policy import LSTMPolicy
from tests.children import environment, python


@dataclass
class Plain:
    a: int = 1
    note: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Slotted:
    a: int
    note: str = field(default="", compare=False)


def closing_over(value):
    return lambda a: (value, a)


DIFFERENT = {
    "integers": lambda k: k,
    "floats": lambda k: 0.5 * k,
    "tensors": lambda k: torch.tensor([1.0, k]),
    "objects in arrays": lambda k: np.array([k, "a"], dtype=object),
    "dtypes": lambda k: torch.zeros(2, dtype=torch.float64 if k else torch.float32),
    "models": lambda k: LineGrid(horizon=3 + k),
    "networks": lambda k: LSTMPolicy(LineGrid(), hidden=4, seed=k),
    "frames": lambda k: pd.DataFrame({"a": [1, k], "word": ["x", "y"]}),
    "generators": np.random.default_rng,
    "slots of a dataclass": Slotted,
    "closures": closing_over,
    "modules in closures": lambda k: closing_over(np if k else math),
    "defaults": lambda k: lambda a, b=k: a,
    "cached functions": lambda k: lru_cache(lambda x: (x, k)),
    "partials": lambda k: partial(max, k),
    "methods of no class": lambda k: MethodType(lambda self: k, "a"),
    "mappings that cannot be changed": lambda k: MappingProxyType({"a": k}),
    "short floats": lambda k: torch.tensor([k], dtype=torch.bfloat16),
    "sparse tensors": lambda k: torch.eye(2 + k).to_sparse(),
    "conjugates": lambda k: torch.tensor([k + 1j]).conj(),
    "nested": lambda k: {"a": ({"b": [Plain(k)]},)},
}


@pytest.mark.parametrize("make", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_what_is_held_tells_values_apart(make):
    assert fingerprint(make(0)) == fingerprint(make(0))
    assert fingerprint(make(0)) != fingerprint(make(1))


OTHERS = [
    (1, 1.0),
    (1, True),
    (0.0, -0.0),
    ("1", 1),
    ([1, 2], [2, 1]),
    ([1], (1,)),
    ({"a": 1}, {"b": 1}),
    ({1}, frozenset({1})),
    (LineGrid(), ContextualTiger()),
    (lambda x: x + 1, lambda x: x + 2),
    (len, abs),
    (torch.float64, torch.float32),
]


@pytest.mark.parametrize(("one", "other"), OTHERS)
def test_kinds_and_orders_tell_values_apart(one, other):
    assert fingerprint(one) != fingerprint(other)


def test_what_is_not_compared_or_merely_cached_makes_no_difference():
    assert fingerprint(Plain(1, "here")) == fingerprint(Plain(1, "there"))
    assert fingerprint(Slotted(1, "here")) == fingerprint(Slotted(1, "there"))

    class Table:
        @cached_property
        def squares(self):
            return [k * k for k in range(3)]

    one, other = Table(), Table()
    assert one.squares == [0, 1, 4]
    assert fingerprint(one) == fingerprint(other)


def test_values_are_left_alone_and_use_changes_nothing():
    policy, model = LSTMPolicy(LineGrid(), hidden=4, seed=0), LineGrid()
    for parameter in policy.parameters():
        parameter.unconstrained = weakref.ref(parameter)  # as Pyro's param store does
    first, fresh = fingerprint(policy), fingerprint(model)
    assert all(parameter.unconstrained() is parameter for parameter in policy.parameters())
    assert fingerprint(policy) == first
    model.check()
    assert fingerprint(model) == fresh


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (threading.Lock(), "_thread:lock"),
        ({"a": [Plain(threading.Lock())]}, "_thread:lock"),
        ((k for k in range(3)), "builtins:generator"),
        (torch.ones(2, device="meta"), "torch:Tensor"),
    ],
)
def test_what_cannot_be_looked_into_is_refused(value, name):
    with pytest.raises(FingerprintError, match=f"a {name} cannot be told from others"):
        fingerprint(value)


def test_what_is_nested_too_deeply_is_refused():
    deep = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(FingerprintError, match="nested too deeply"):
        fingerprint(deep)


def test_shared_values_and_circles():
    shared, other = [1], [2]
    for _ in range(200):  # 2**200 paths
        shared, other = [shared, shared], [other, other]
    assert fingerprint(shared) != fingerprint(other)

    def circles(crossed):
        """Two nodes that lead back to themselves, or the second to the first."""
        first, second = [1], [2]
        first.append([first])
        second.append(first[1] if crossed else [second])
        return [first, second]

    assert fingerprint(circles(True)) == fingerprint(circles(True))
    assert fingerprint(circles(True)) != fingerprint(circles(False))


CODE = """
class Base:
    def step(self):
        return {number}

class Task(Base):
    @property
    def half(self):
        return {number} / 2

def task(a):
    try:
        return {number}
    finally:
        pass
"""


def loaded(path, name="edited"):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_code_that_runs_is_what_counts(tmp_path, monkeypatch):
    """Not that of the file, which may have been edited since; and not where it stands."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / "edited.py"
    path.write_text(CODE.format(number=1))
    old = loaded(path)
    before = fingerprint(old.task), fingerprint(old.Task())
    path.write_text(CODE.format(number=2))
    assert (fingerprint(old.task), fingerprint(old.Task())) == before
    new = loaded(path)
    assert fingerprint(new.task) != before[0]
    assert fingerprint(new.Task()) != before[1]
    path.write_text("# moved\n\n" + CODE.format(number=1).replace("return", "return  "))
    again = loaded(path)
    assert (fingerprint(again.task), fingerprint(again.Task())) == before


def test_code_and_attributes_of_classes():
    def made(**attributes):
        return type("Made", (), attributes)

    assert fingerprint(made(a=1)()) == fingerprint(made(a=1)())
    assert fingerprint(made(a=1)()) != fingerprint(made(a=2)())
    assert fingerprint(made(f=lambda self: 1)()) != fingerprint(made(f=lambda self: 2)())
    wrappers = (staticmethod, classmethod, property, cached_property, lru_cache, partialmethod)
    for wrapper in (*wrappers, singledispatchmethod):
        for name in ("f", "__call__"):
            one, other = (made(**{name: wrapper(f)})() for f in (lambda x: 1, lambda x: 2))
            assert fingerprint(one) != fingerprint(other)

    def size(number):
        return enum.Enum("Size", {"BIG": number, "SMALL": 0}, module="elsewhere")

    assert fingerprint(size(1).BIG) == fingerprint(size(1).BIG)
    assert len({fingerprint(each) for each in (size(1).BIG, size(1).SMALL, size(2).BIG)}) == 3


GUARDED = """
def task(x):
    try:
        first = begin(x)
        last = go_on(first)
    except ValueError:
        return 0
    return last
"""

UNGUARDED = """
def task(x):
    try:
        first = begin(x)
    except ValueError:
        return 0
    else:
        last = go_on(first)
    return last
"""


def test_what_a_try_guards_counts(tmp_path, monkeypatch):
    """It is not among the instructions, which are the same."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    tasks = []
    for name, text in {"guarded": GUARDED, "unguarded": UNGUARDED}.items():
        (tmp_path / f"{name}.py").write_text(text)
        tasks.append(loaded(tmp_path / f"{name}.py", "edited").task)
    assert tasks[0].__code__.co_code == tasks[1].__code__.co_code
    assert fingerprint(tasks[0]) != fingerprint(tasks[1])


def test_functions_of_two_modules_find_different_things_there(tmp_path):
    (tmp_path / "one.py").write_text("def task(x):\n    return FACTOR * x")
    one, other = (loaded(tmp_path / "one.py", name).task for name in ("one", "other"))
    assert fingerprint(one) != fingerprint(other)


def test_code_in_a_file_that_is_called_like_one_of_python(tmp_path, monkeypatch):
    """`profile.py` beside a script is the user's own, and may be edited."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / "profile.py"
    found = []
    for number in (1, 2):
        path.write_text(CODE.format(number=number))
        module = loaded(path, "profile")
        monkeypatch.setitem(sys.modules, "profile", module)
        found.append(fingerprint(module.Task()))
    assert found[0] != found[1]


def test_the_order_of_a_dict_makes_no_difference_to_circles_in_it():
    """A class leads back to itself by the cell of `super()`."""

    class Circle(Plain):
        def size(self):
            return super().size()

    one, other = {"a": [1], "b": Circle()}, {"b": Circle(), "a": [1]}
    assert fingerprint(one) == fingerprint(other)


VALUES = """
import enum, random
import numpy as np
import pandas as pd
import torch
from cpomdp_ppl.models import LineGrid
from solvers.cids.policy import LSTMPolicy

class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"

class Model(LineGrid):
    def __init__(self):
        super().__init__(horizon=3)

    def reward(self, state, action, context):
        return 2 * super().reward(state, action, context)

values = [
    lambda x: x in {"a", "b", "c", "d"},
    {"a", "b", ("c", 1), frozenset({"d", "e"})},
    {Colour.RED, Colour.BLUE},
    {Colour.RED: 1, "a": 2},
    Model(),
    LSTMPolicy(LineGrid(), hidden=4, seed=0),
    pd.DataFrame({"a": [1, 2], "word": ["x", "y"]}),
    random.Random(0),
    np.random.default_rng(0),
    torch.float64,
]
"""


def said(code, hash_seed, sent=b""):
    settings = {"env": environment(PYTHONHASHSEED=hash_seed), "input": sent, "capture_output": True}
    return subprocess.run(python(code), check=True, **settings).stdout


@pytest.mark.slow
def test_the_same_in_every_process_and_after_the_way_there():
    """Classes and functions, too, that are sent by value."""
    pytest.importorskip("cloudpickle")
    start = "import sys, pickle; from cpomdp_ppl.experiments.fingerprint import fingerprint"
    send = "import cloudpickle; found = [fingerprint(value) for value in values]"
    sent = said(
        f"{start}\n{VALUES}\n{send}\nsys.stdout.buffer.write(cloudpickle.dumps((found, values)))", "1"
    )
    arrived = "found, values = pickle.load(sys.stdin.buffer); print(*found, *map(fingerprint, values))"
    found = said(f"{start}\n{arrived}", "2", sent).split()
    assert found[:10] == found[10:]
    assert len(set(found)) == 10


def test_names():
    assert name_of(test_names) == f"{__name__}:test_names"
    assert name_of(partial(test_names, 1)) == f"{__name__}:test_names"
    assert name_of(Plain()) == f"{__name__}:Plain"


def test_hashes_of_files_and_folders(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("one")
    before = file_hash(tmp_path)
    assert file_hash(tmp_path / "a" / "x.txt") != before
    (tmp_path / "a" / "x.txt").rename(tmp_path / "a" / "y.txt")
    assert file_hash(tmp_path) != before


def test_descriptions_are_json_and_name_what_differs():
    def ramp(progress):
        return 2.0 * progress

    assert describe({"a": (1, np.float64(0.5)), "b": torch.ones(2)}) == {"a": [1, 0.5], "b": [1.0, 1.0]}
    assert type(describe(np.float64(0.5))) is float  # which is also a float, but NumPy's
    assert describe(Plain(3)) == {"": "Plain", "a": 3, "note": ""}
    assert describe(ramp)[1:] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert describe(partial(pow, 2))[1:] == [2**0.0, 2**0.25, 2**0.5, 2**0.75, 2.0]
    assert describe(torch.nn.Tanh()) == "Tanh"  # is called with something else
    one, other = describe_model(LineGrid()), describe_model(LineGrid(horizon=3))
    assert set(differences(one, other)) == {"constants", "horizon"}
    assert differences({"a": math.nan, "b": 1}, {"a": math.nan, "b": 1.0}) == ["b"]
    require_same(Path("file"), one, one)
    with pytest.raises(CheckpointError, match=r"made with s = \{'a': 1\}, but expected \{'a': 2\};"):
        require_same(Path("file"), {"s": {"a": 1, "b": 0}}, {"s": {"a": 2, "b": 0}})
