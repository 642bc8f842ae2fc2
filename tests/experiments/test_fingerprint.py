"""Digests: others for other values and other code, the same in every process, and a refusal for the rest."""

from __future__ import annotations

import enum
import gc
import importlib.util
import itertools
import logging
import math
import os
import random
import re
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, wraps
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from torch import nn

from cpomdp_ppl.experiments.fingerprint import MODULE_MACHINERY, FingerprintError, fingerprint
from cpomdp_ppl.models import LineGrid
from solvers.cids.policy import LSTMPolicy

ROOT = Path(__file__).parents[2]


@dataclass
class Plain:
    a: int = 1
    note: str = field(default="", compare=False)


class WithMore(Plain):
    def __init__(self, w, note=""):
        super().__init__(1, note)
        self.w = w


@dataclass(frozen=True, slots=True)
class Slotted:
    a: int
    note: str = field(default="", compare=False)


@dataclass
class Listed(list):
    a: int = 1


@dataclass(eq=False)
class Layer(nn.Module):
    a: int = 1

    def __post_init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))


class Keeping:
    __slots__ = ("a", "b")

    def __init__(self, a):
        self.a = a


class Named(dict):
    def __init__(self, name, *arguments):
        super().__init__(*arguments)
        self.name = name


def labelled(kind, name, *arguments):
    """A value of a built-in kind that has a name, too."""
    value = type("Labelled", (kind,), {})(*arguments)
    value.name = name
    return value


def layer(weight, trained=True):
    value = Layer()
    with torch.no_grad():
        value.weight.fill_(weight)
    value.weight.requires_grad_(trained)
    return value


def closing_over(module):
    return lambda a: module.sin(a)


def listed(k):
    value = Listed()
    value.append(k)
    return value


def with_attribute(k):
    def function(a):
        return a

    function.scale = k
    return function


MADE = {
    "frame": lambda k: pd.DataFrame({"a": [1, k], "word": ["x", "y"]}),
    "series": lambda k: pd.Series([1.0, k]),
    "words of pandas": lambda k: pd.Series(["a", f"b{k}"]),
    "coordinates": lambda k: xr.Dataset({"y": ("x", [1, 2])}, {"x": [0, k]}),
    "random": random.Random,
    "generator": np.random.default_rng,
    "state": np.random.RandomState,
    "generator of torch": lambda k: torch.Generator().manual_seed(k),
    "method of a generator": lambda k: np.random.default_rng(k).normal,
    "counter": itertools.count,
    "pattern": lambda k: re.compile(f"a{k}"),
    "subclass of a dataclass": WithMore,
    "dataclass with slots": Slotted,
    "dataclass that is a list": listed,
    "parameters of a dataclass": layer,
    "slots": Keeping,
    "attribute of a dict": lambda k: Named(k, {"a": 1}),
    "attribute of a float": lambda k: labelled(float, k, 1.0),
    "attribute of a set": lambda k: labelled(set, k, [1]),
    "value of a float": lambda k: labelled(float, "", k),
    "objects": lambda k: np.array([k, "a"], dtype=object),
    "names of fields": lambda k: np.zeros(2, dtype=[(f"f{k}", "f4")]),
    "masked": lambda k: np.ma.masked_array([1, 2], mask=[True, k == 0]),
    "logger": lambda k: logging.getLogger(f"name {k}"),
    "cached function": lambda k: lru_cache(lambda x: (x, k)),
    "attribute of a function": with_attribute,
    "nested": lambda k: {"a": ({"b": [Plain(k)]},)},
    "weak reference": lambda k: [strong := Plain(k), weakref.ref(strong)],
    "a very large number": lambda k: 10**6000 + k,
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE.keys())
def test_what_is_held_tells_values_apart(make):
    assert fingerprint(make(0)) == fingerprint(make(0))
    assert fingerprint(make(0)) != fingerprint(make(1))


def test_what_is_not_compared_or_merely_kept_makes_no_difference():
    assert fingerprint(Plain(1, "here")) == fingerprint(Plain(1, "there"))
    assert fingerprint(WithMore(1, "here")) == fingerprint(WithMore(1, "there"))
    assert fingerprint(Slotted(1, "here")) == fingerprint(Slotted(1, "there"))
    assert fingerprint(layer(0.0)) != fingerprint(layer(0.0, trained=False))

    class Table:
        @cached_property
        def squares(self):
            return [k * k for k in range(3)]

    one, other = Table(), Table()
    assert one.squares == [0, 1, 4]
    assert fingerprint(one) == fingerprint(other)


def test_one_module_does_not_change_what_is_seen_of_others():
    class Kept(nn.Module):
        @cached_property
        def table(self):
            return 1

    class Given(nn.Module):
        def __init__(self, table):
            super().__init__()
            self.table = table

    before, machinery = fingerprint(Given(1)), set(MODULE_MACHINERY)
    kept = Kept()
    assert kept.table == 1
    fingerprint(kept)
    assert machinery == MODULE_MACHINERY
    assert fingerprint(Given(1)) == before != fingerprint(Given(2))


def test_digests_leave_values_alone():
    policy = LSTMPolicy(LineGrid(), hidden=4, seed=0)
    for parameter in policy.parameters():
        parameter.unconstrained = weakref.ref(parameter)  # as Pyro's param store does
    first = fingerprint(policy)
    assert all(parameter.unconstrained() is parameter for parameter in policy.parameters())
    assert fingerprint(policy) == first != fingerprint(LSTMPolicy(LineGrid(), hidden=4, seed=1))
    rng = np.random.default_rng(0)
    fingerprint(rng)
    assert rng.random() == np.random.default_rng(0).random()


def test_digests_leave_classes_alone():
    """Python notes the slots of a class in it when one of its kind is first looked at."""

    class Base:
        pass

    class Derived(Base):
        pass

    before = fingerprint(Derived())
    fingerprint(Base())
    assert fingerprint(Derived()) == before


def test_nothing_is_kept_alive():
    def function():
        return 1

    gone = weakref.ref(function)
    fingerprint(function)
    del function
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (threading.Lock(), "_thread:lock"),
        ({"a": [Plain(threading.Lock())]}, "_thread:lock"),
        ((k for k in range(3)), "builtins:generator"),
        (torch.ones(2, device="meta"), "torch:Tensor"),
    ],
)
def test_what_cannot_be_seen_is_refused(value, name):
    with pytest.raises(FingerprintError, match=f"a {name} cannot be told from others"):
        fingerprint(value)


def test_what_is_nested_too_deeply_is_refused():
    deep = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(FingerprintError, match="nested too deeply"):
        fingerprint(deep)


def test_what_is_shared_is_described_once():
    shared, other = [1], [2]
    for _ in range(200):  # 2**200 paths
        shared, other = [shared, shared], [other, other]
    assert fingerprint(shared) != fingerprint(other)
    pair = (1, 2)
    assert fingerprint([pair, pair]) == fingerprint([tuple(range(1, 3)), tuple(range(1, 3))])


def test_circles_are_told_apart():
    """Two nodes that lead back to themselves, or the second to the first."""

    def circles(crossed):
        first, second = [1], [2]
        first.append([first])
        second.append(first[1] if crossed else [second])
        return [first, second]

    assert fingerprint(circles(True)) == fingerprint(circles(True))
    assert fingerprint(circles(True)) != fingerprint(circles(False))


def test_modules_are_known_by_name_and_version():
    assert fingerprint(closing_over(np)) != fingerprint(closing_over(math))
    assert fingerprint(closing_over(np)) == fingerprint(closing_over(np))
    fake = type(np)("numpy")
    fake.__version__ = "0.0"
    assert fingerprint(fake) != fingerprint(np)


def thousandfold(function):
    @wraps(function)
    def inside(a):
        return 1000 * function(a)

    return inside


def onefold(function):
    @wraps(function)
    def inside(a):
        return 1 * function(a)

    return inside


def test_a_wrapper_is_not_what_it_wraps():
    def base(a):
        return a

    assert len({fingerprint(base), fingerprint(onefold(base)), fingerprint(thousandfold(base))}) == 3


def loaded(path, name="edited"):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    for wrapper in (staticmethod, classmethod, property, cached_property):
        one, other = (made(f=wrapper(f))() for f in (lambda x: 1, lambda x: 2))
        assert fingerprint(one) != fingerprint(other)


def test_members_of_enumerations():
    def made(number):
        return enum.Enum("Size", {"BIG": number, "SMALL": 0}, module="elsewhere")

    assert fingerprint(made(1).BIG) == fingerprint(made(1).BIG)
    assert fingerprint(made(1).BIG) != fingerprint(made(2).BIG)
    assert fingerprint(made(1).BIG) != fingerprint(made(1).SMALL)


ELSEWHERE = """
import enum, random
import numpy as np
import pandas as pd
import torch
from cpomdp_ppl.experiments.fingerprint import fingerprint
from cpomdp_ppl.models import LineGrid
from solvers.cids.policy import LSTMPolicy

class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"

class Model(LineGrid):
    def __init__(self):
        super().__init__(horizon=3)

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
    fingerprint,
]
print([fingerprint(value) for value in values])
"""


def test_digests_are_the_same_in_every_process():
    said = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}
        words = [sys.executable, "-c", ELSEWHERE]
        said.add(subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout)
    (only,) = said
    assert len(set(only.split())) == 11


def test_a_value_that_was_sent_to_another_process_is_the_same():
    """Classes and functions, too, that are sent whole."""
    cloudpickle = pytest.importorskip("cloudpickle")

    class Local(LineGrid):
        def __init__(self, horizon):
            super().__init__(horizon=horizon)

        def reward(self, state, action, context):
            return 2 * super().reward(state, action, context)

    values = [Local(3), Local, lambda x: x in {"a", "b"}, LSTMPolicy(LineGrid(), hidden=4, seed=0), Plain(2)]
    code = "import sys, pickle; from cpomdp_ppl.experiments.fingerprint import fingerprint; " + (
        "print(*map(fingerprint, pickle.load(sys.stdin.buffer)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"}
    words, sent = [sys.executable, "-c", code], cloudpickle.dumps(values)
    there = subprocess.run(words, env=environment, input=sent, capture_output=True, check=True).stdout
    assert there.decode().split() == [fingerprint(value) for value in values]
