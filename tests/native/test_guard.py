"""The guard notices every change of what programs read, and nothing else; what it cannot see is refused."""

from __future__ import annotations

import collections
import contextlib
import copy
import cProfile
import dataclasses
import datetime
import enum
import functools
import gc
import itertools
import logging
import operator
import os
import random
import sys
import threading
import time
import types
import weakref
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import nn
from torch.distributions import constraints

from cpomdp_ppl import CPOMDP
from cpomdp_ppl.handlers import Batched
from cpomdp_ppl.models import Beacons, ContextualTiger, LightDark, LineGrid
from cpomdp_ppl.native import watching
from cpomdp_ppl.native.guard import LARGE, Unguardable, same
from cpomdp_ppl.native.watching import Watch
from cpomdp_ppl.rng import isolated
from examples.problems.clinic import Clinic
from examples.problems.machine import Machine
from examples.problems.robot import Robot
from examples.problems.well import Well
from tests.programs import Plates, Walk

constants = types.ModuleType("constants")  # somebody's own module
NOISE, TABLE, WEIGHTS = 0.5, [1.0, 2.0], torch.tensor([1.0, 2.0])
COUNT = 0
NOISES = {"sharp": 2.0}
CLOCK, GENERATOR, LOG = time.time, np.random.default_rng(0), logging.getLogger("guard")


def guard_of(program, inputs=()):
    with Watch() as watch:
        program()
    guard = watch.guard(inputs)
    guard.program = program  # a function that is gone has changed
    return guard


def run(model):
    """All four programs, as the engine runs them."""
    zero = torch.zeros((1, 1, 1) + (1,) * model.max_plate_nesting, dtype=torch.long)
    engine = Batched((1, 1, 1), model.max_plate_nesting)
    with isolated(0), torch.no_grad(), poutine.block(), model.running(), engine:
        state = model.transition(model.initial(zero), zero, zero)
        model.observation(state, zero, zero)
        model.reward(state, zero, zero)


def model_guard(model, inputs=()):
    with Watch() as watch:
        watching_run(model)
    return watch.guard(inputs)


# As the engine's own, this function is not watched: programs are called from outside.
watching_run = types.FunctionType(
    run.__code__.replace(co_filename=watching.__file__), globals(), "watching_run"
)


class Box:
    """Any object of a user's; what is read of it is `value`."""

    shared = 1.0

    def __init__(self, value=None):
        self.value = value

    def method(self):
        return self.value

    @property
    def doubled(self):
        return 2 * self.value


class Child(Box):
    pass


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


@dataclass
class Settings:
    value: float = 1.0
    inner: Box = field(default_factory=lambda: Box(1.0))


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Pair(NamedTuple):
    first: float
    second: list


class Names(dict):
    """A user's dictionary."""


class Fallback:
    """Finds attributes in a dictionary."""

    def __init__(self):
        self._data = {"value": 1.0}

    def __getattr__(self, name):
        return self._data[name]


def helper(x=1.0, *, y=2.0):
    return x * y


def adder(step):
    def add(x=0.0):
        return x + step

    return add


def counter():
    n = 0

    def count():
        nonlocal n
        n += 1
        return n

    return count


# -------------------------------------------------------------------------------- values of an attribute

NAN = float("nan")
VALUES = [
    *((1, 2), (1, True), (1, 1.0), (0.0, -0.0), (1.5, 2.5), (1.5, NAN), ("a", "b"), (True, False), (None, 0)),
    *((1j, 2j), (b"a", b"b"), (10**40, 10**40 + 1), (Colour.RED, Colour.BLUE), (range(2), range(3))),
    *(((1, 2), (1, 3)), ((1, (2,)), (1, (2.0,))), ([1, 2], [1, 2, 3]), ([[1]], [[2]]), ({1}, {2})),
    *(
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": [1]}, {"a": []}),
    ),
    *((frozenset({1}), frozenset({2})), (collections.deque([1]), collections.deque([2]))),
    *(
        (collections.OrderedDict(a=1), {"a": 1}),
        (collections.defaultdict(int), collections.defaultdict(float)),
    ),
    *((np.arange(3), np.arange(3.0)), (np.zeros(2), np.zeros((2, 1))), (np.float32(1), np.float32(2))),
    *((np.float32(1), np.float64(1)), (np.zeros(2), np.array([0.0, -0.0])), (np.dtype("f4"), np.dtype("f8"))),
    *((torch.zeros(2), torch.ones(2)), (torch.zeros(2), torch.zeros(2).double()), (torch.zeros(()), 0.0)),
    *(
        (torch.zeros(2), torch.zeros(1, 2)),
        (torch.zeros(1), torch.tensor([-0.0])),
        (torch.float32, torch.float64),
    ),
    *((torch.zeros(2).bfloat16(), torch.ones(2).bfloat16()), (torch.ones(2).to_sparse(), torch.ones(2))),
    *(([torch.zeros(2)], [torch.ones(2)]), ({"a": torch.zeros(2)}, {"a": torch.ones(2)})),
    *((Box(1), Box(1)), (Settings(), Settings()), (Slotted(1), Slotted(1)), (Pair(1, []), Pair(2, []))),
    *(
        (math_function, other)
        for math_function, other in ((abs, round), (torch.sin, torch.cos), (np.sin, np.cos))
    ),
    *((functools.partial(helper, 1.0), functools.partial(helper, 2.0)), (Box(1).method, Box(1).method)),
    *((lambda: 1, lambda: 2), (Box, Child), (dist.Normal(0.0, 1.0), dist.Normal(0.0, 2.0))),
    *((constraints.positive, constraints.real), (nn.Linear(1, 1), nn.Linear(1, 1)), (torch.Size([1]), (1,))),
    *((datetime.timedelta(1), datetime.timedelta(2)), (weakref.ref(Box), weakref.ref(Child)), (..., None)),
]


@pytest.mark.parametrize(("value", "other"), VALUES, ids=lambda value: type(value).__name__)
def test_another_value_of_an_attribute(value, other):
    box = Box(value)
    guard = guard_of(lambda: box.value)
    assert guard.holds()
    assert guard.changed() is None
    box.value = other
    assert not guard.holds()
    assert "value" in guard.changed()
    box.value = value  # put back
    assert guard.holds()
    del box.value
    assert not guard.holds()


@pytest.mark.parametrize(
    ("value", "equal"),
    [
        *((1.5, float("1.5")), (NAN, -NAN), (10**40, 10**40 + 0), ("ab", "".join("ab"))),
        *(((1.5, (NAN,)), (1.5, (-NAN,))), ([1.0, [2.0]], [1.0, [2.0]]), ({"a": {1}}, {"a": {1}})),
        *((torch.ones(2), torch.ones(2)), (np.ones(2), np.ones(2)), (np.float32(1), np.float32(1))),
        ({"a": torch.ones(2)}, {"a": torch.ones(2)}),
    ],
)
def test_an_equal_value_is_the_same(value, equal):
    box = Box(value)
    guard = guard_of(lambda: box.value)
    box.value = equal
    assert guard.holds()


def test_plain_values_are_told_apart():
    assert same(NAN, float("nan"))
    assert not same(1, 1.0)
    assert not same(0.0, -0.0)
    assert not same(complex(0.0, 0.0), complex(0.0, -0.0))


# ------------------------------------------------------------------------------ changes inside of values


def _set(name, value):
    return lambda owner: setattr(owner, name, value)


INSIDE = {
    "item of a list": ([1, [2]], lambda v: v[1].append(3)),
    "item of a dictionary": ({"a": {"b": 1}}, lambda v: v["a"].update(b=2)),
    "member of a set": ({1, 2}, lambda v: v.add(3)),
    "a deque": (collections.deque([1]), lambda v: v.append(2)),
    "a user's dictionary": (Names(a=1), lambda v: v.update(a=2)),
    "a named tuple's list": (Pair(1.0, [1]), lambda v: v.second.append(2)),
    "an object": (Box([1]), lambda v: v.value.append(2)),
    "an object of an object": (Box(Box(1)), lambda v: _set("value", 2)(v.value)),
    "an object in a list": ([Box(1)], lambda v: _set("value", 2)(v[0])),
    "an object in a dictionary": ({"a": Box(1)}, lambda v: _set("value", 2)(v["a"])),
    "another class": (Box(1), _set("__class__", Child)),
    "slots": (Slotted(1), _set("value", 2)),
    "slots deleted": (Slotted(1), lambda v: delattr(v, "value")),
    "slots inside": (Slotted([1]), lambda v: v.value.append(2)),
    "a dataclass": (Settings(), _set("value", 2.0)),
    "a dataclass inside": (Settings(Box(1)), lambda v: _set("value", 2.0)(v.value)),
    "a namespace": (types.SimpleNamespace(a=1), _set("a", 2)),
    "more in a namespace": (types.SimpleNamespace(a=1), _set("b", 2)),
    "an enumeration": (Box(Colour.RED), lambda v: v.__dict__.update(value=Colour.BLUE)),
    "an array": (np.zeros(3), lambda v: v.__setitem__(0, 1)),
    "an array in a list": ([np.zeros(3)], lambda v: v[0].__setitem__(0, 1)),
    "a large array": (np.zeros(LARGE), lambda v: v.__setitem__(LARGE // 2, 1)),
    "a tensor": (torch.zeros(3), lambda v: v.add_(1)),
    "a tensor by its data": (torch.zeros(3), lambda v: v.data.add_(1)),
    "a tensor of other data": (torch.zeros(3), _set("data", torch.ones(3))),
    "a tensor of other data and shape": (torch.zeros(4), _set("data", torch.zeros(2, 2))),
    "a tensor's shape": (torch.zeros(2, 3), lambda v: v.t_()),
    "a tensor's layout": (torch.arange(4.0).view(2, 2), lambda v: v.t_()),
    "a tensor by its view": (torch.zeros(3), lambda v: v.view(3, 1)[1].fill_(2)),
    "a tensor that is a view": (torch.zeros(4)[::2], lambda v: v._base.fill_(2)),
    "a tensor by NumPy": (torch.zeros(3), lambda v: v.numpy().fill(1)),
    "a tensor in a list": ([torch.zeros(3)], lambda v: v[0].data.add_(1)),
    "a tensor in a dictionary": ({"a": torch.zeros(3)}, lambda v: v["a"].data.add_(1)),
    "a tensor of the other zero": (torch.zeros(1), lambda v: v.neg_()),
    "a large tensor": (torch.zeros(LARGE), lambda v: v.data[LARGE // 2].fill_(1)),
    "a bfloat16 tensor": (torch.zeros(3).bfloat16(), lambda v: v.data.add_(1)),
    "a complex tensor": (torch.zeros(3) + 1j, lambda v: v.data.add_(1)),
    "a conjugate tensor": ((torch.zeros(3) + 1j).conj(), lambda v: v.data.add_(1)),
    "a tensor of gradients": (torch.zeros(3, requires_grad=True), lambda v: v.data.add_(1)),
    "an empty tensor": (torch.zeros(0), _set("data", torch.zeros(1))),
    "a partial's list": (functools.partial(helper, [1]), lambda v: v.args[0].append(2)),
    "a partial's keyword": (functools.partial(helper, y=1), lambda v: v.keywords.update(y=2)),
    "a bound method's object": (Box(1).method, lambda v: _set("value", 2)(v.__self__)),
    "a module's weight": (nn.Linear(2, 1), lambda v: v.weight.data.add_(1)),
    "a module's replaced weight": (nn.Linear(2, 1), _set("weight", nn.Parameter(torch.ones(1, 2)))),
    "a module's attribute": (nn.LeakyReLU(0.1), _set("negative_slope", 0.2)),
    "a module's method": (nn.LeakyReLU(0.1), _set("forward", torch.exp)),
    "a module's mode": (nn.Dropout(), lambda v: v.eval()),
    "a module's hook": (nn.Linear(1, 1), lambda v: v.register_forward_hook(lambda *_: torch.ones(1))),
    "a module's buffer": (nn.BatchNorm1d(2).eval(), lambda v: v.running_mean.add_(1)),
    "a module of a module": (nn.Sequential(nn.Linear(1, 1)), lambda v: v[0].bias.data.add_(1)),
    "a module more": (nn.Sequential(nn.Linear(1, 1)), lambda v: v.append(nn.Linear(1, 1))),
    "a distribution": (dist.Normal(torch.zeros(1), 1.0), lambda v: v.loc.add_(1)),
    "a constraint": (constraints.greater_than(1.0), _set("lower_bound", 2.0)),
    "a weak reference's object": (weakref.ref(KEPT := Box(1)), lambda v: _set("value", 2)(v())),
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_change_inside_of_a_value(name):
    value, change = INSIDE[name]
    box = Box(value)
    guard = guard_of(lambda: box.value)
    assert guard.holds()
    change(value)
    assert not guard.holds()
    assert guard.changed()


def test_a_tensor_that_shares_memory_with_an_array():
    array = np.zeros(3)
    box = Box(torch.from_numpy(array))
    guard = guard_of(lambda: box.value)
    array[1] = 1
    assert not guard.holds()
    array[1] = 0
    assert guard.holds()


# ------------------------------------------------------------------------ classes, functions and modules


def test_an_attribute_that_hides_that_of_the_class():
    box = Child(1)
    guard = guard_of(lambda: box.shared)
    box.shared = 2.0
    assert "new" in guard.changed()
    del box.shared
    assert guard.holds()


@pytest.mark.parametrize("owner", [Child, Box])
def test_class_attributes_of_every_base(owner, monkeypatch):
    box = Child(1)
    guard = guard_of(lambda: box.shared)
    monkeypatch.setattr(owner, "shared", 2.0, raising=False)
    assert not guard.holds()
    monkeypatch.undo()
    assert guard.holds()
    monkeypatch.setattr(owner, "unread", 2.0, raising=False)
    assert guard.holds()


def test_a_list_of_a_class(monkeypatch):
    monkeypatch.setattr(Box, "shared", [1.0])
    guard = guard_of(lambda: Box.shared)
    Box.shared = [1.0]
    assert guard.holds()
    Box.shared.append(2.0)
    assert not guard.holds()


def test_bases_that_change():
    base = type("Base", (), {"value": 1})
    kind = type("Kind", (type("Middle", (), {}),), {})
    kind.__bases__ = (base,)
    box = kind()
    guard = guard_of(lambda: box.value)
    kind.__bases__ = (type("Base", (), {"value": 1}),)
    assert not guard.holds()


def test_methods_that_are_replaced(monkeypatch):
    box = Child(1)
    guard = guard_of(lambda: box.method())
    for owner in (Box, Child):
        monkeypatch.setattr(owner, "method", lambda self: 2, raising=False)
        assert not guard.holds()
        monkeypatch.undo()
        assert guard.holds()
    box.method = lambda: 2
    assert not guard.holds()


def test_special_methods_that_are_added(monkeypatch):
    box = Box(1)
    guard = guard_of(lambda: box.value)
    monkeypatch.setattr(Box, "__getattribute__", lambda self, name: 2, raising=False)
    assert not guard.holds()


def test_properties_and_what_they_read(monkeypatch):
    box = Box(1)
    guard = guard_of(lambda: box.doubled)
    box.value = 2
    assert not guard.holds()
    box.value = 1
    assert guard.holds()
    monkeypatch.setattr(Box, "doubled", property(lambda self: 3))
    assert not guard.holds()


def test_descriptors():
    class Descriptor:
        def __init__(self):
            self.gain = 1.0

        def __get__(self, instance, owner):
            return self.gain

    kind = type("Kind", (), {"level": Descriptor()})
    thing = kind()
    guard = guard_of(lambda: thing.level)
    vars(kind)["level"].gain = 2.0
    assert not guard.holds()


def test_a_cached_property():
    class Kind:
        start = 1.0

        @functools.cached_property
        def table(self):
            return torch.full((2,), self.start)

    thing = Kind()
    guard = guard_of(lambda: thing.table)  # where it is computed
    assert guard.holds()
    thing.table[0] = 3.0
    assert not guard.holds()
    guard = guard_of(lambda: thing.table)
    del thing.table
    assert not guard.holds()


def test_attributes_that_are_looked_up_in_a_dictionary():
    thing = Fallback()
    guard = guard_of(lambda: thing.value)
    thing._data["value"] = 2.0
    assert not guard.holds()


def test_attributes_by_computed_names():
    box = types.SimpleNamespace()
    box.inner = Box()
    box.inner.noise_0, box.inner.unread = 1.0, 1.0
    guard = guard_of(lambda: [getattr(box.inner, f"noise_{i}") for i in range(1)])
    box.inner.noise_0 = 2.0
    assert not guard.holds()


@pytest.mark.parametrize(
    "read",
    [
        lambda box: getattr(box, "value", 0),
        lambda box, name="value": getattr(box, name, "nothing"),
        lambda box, end="ue": getattr(box, "val" + end),
        lambda box, end="ue": getattr(box, f"val{end}"),
        lambda box: functools.reduce(getattr, ("value",), box),
        lambda box, read=getattr: read(box, "val" + "ue"),
        lambda box: box.__dict__["val" + "ue"],
        lambda box: vars(box)["val" + "ue"],
        operator.attrgetter("value"),
        lambda box: operator.attrgetter("val" + "ue")(box),
    ],
)
def test_attributes_by_name(read):
    box = Box(1)

    def program():
        return read(box)

    guard = guard_of(program)
    box.value = 2
    assert not guard.holds()


def test_patterns_name_attributes():
    box = Pair(Box(1), [])

    def program():
        match box:
            case Pair(Box(value=1), _):
                return 1.0
        return 2.0

    guard = guard_of(program)
    box.first.value = 2
    assert not guard.holds()


class Summed(nn.Module):
    """Reads its tensors without a name."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("level", torch.ones(1))

    def forward(self):
        return sum(each.sum() for each in (*self.parameters(), *self.buffers()))


class Meta(type):
    gain = 1.0


class Made(metaclass=Meta):
    static = staticmethod(functools.partial(max, [1.0]))


def _box(value):
    return lambda: Box(value)


ONE = torch.ones(1, 1)
THROUGH_LIBRARIES = {
    "fields": (Settings, dataclasses.asdict, _set("value", 2.0)),
    "a copy": (Settings, lambda x: copy.copy(x).value, _set("value", 2.0)),
    "a deep copy": (Settings, lambda x: copy.deepcopy(x).value, _set("value", 2.0)),
    "a list's method": (
        lambda: Box([1.0].index),
        lambda x: x.value(1.0),
        lambda x: x.value.__self__.append(2),
    ),
    "a list's special method": (
        *(lambda: Box([1.0].__len__), lambda x: x.value()),
        lambda x: x.value.__self__.append(2),
    ),
    "a static partial": (Made, lambda x: x.static(), lambda x: x.static.args[0].append(2.0)),
    "a metaclass": (Made, lambda x: type(x).gain, lambda x: setattr(Meta, "gain", 2.0)),
    "vmap": (_box(2.0), lambda x: torch.vmap(lambda y: y * x.value)(torch.ones(3)), _set("value", 3.0)),
    "NumPy": (_box(2.0), lambda x: np.vectorize(lambda y: y * x.value)(np.ones(2)), _set("value", 3.0)),
    "parameters": (Summed, lambda x: x(), lambda x: x.weight.data.add_(1)),
    "buffers": (Summed, lambda x: x(), lambda x: x.level.data.add_(1)),
    "another parameter": (Summed, lambda x: x(), _set("more", nn.Parameter(torch.ones(1)))),
    "a state": (Summed, lambda x: x.state_dict()["level"], lambda x: x.level.data.add_(1)),
    "weights by weak references": (
        *(lambda: nn.LSTM(1, 1), lambda x: x(ONE)),
        lambda x: x.weight_ih_l0.data.add_(1),
    ),
    "a list of parameters": (
        *(lambda: nn.ParameterList([nn.Parameter(torch.ones(1))]), lambda x: x[0] * 2),
        lambda x: x[0].data.add_(1),
    ),
    "lazy probabilities": (
        *(lambda: Box(dist.Categorical(logits=torch.zeros(3))), lambda x: x.value.probs),
        lambda x: x.value.logits.add_(torch.arange(3.0)),
    ),
    "a transform that remembers": (
        lambda: Box(dist.transforms.AffineTransform(0.0, 2.0, cache_size=1)),
        lambda x: x.value(torch.ones(1)),
        lambda x: _set("scale", 3.0)(x.value),
    ),
}


@pytest.mark.parametrize("name", THROUGH_LIBRARIES)
def test_what_libraries_read_for_the_program(name):
    make, read, change = THROUGH_LIBRARIES[name]
    thing = make()

    def program():
        return read(thing)

    guard = guard_of(program)
    program()
    assert guard.changed() is None
    change(thing)
    assert not guard.holds()


class Sensor:
    """Special methods, which read what the program does not mention."""

    offset = 1.0

    def __init__(self):
        self.__gain, self.parts, self.count = 2.0, [1.0], 3

    def __mul__(self, other):
        return other * self.__gain * self.unit()

    def __iter__(self):
        yield from self.parts

    def __index__(self):
        return self.count

    @classmethod
    def unit(cls):
        return cls.offset

    @staticmethod
    def level():
        return NOISE


@pytest.mark.parametrize(
    ("name", "value"),
    [("_Sensor__gain", 3.0), ("parts", [2.0]), ("count", 2), ("offset", 2.0), ("unit", lambda: 3.0)],
)
def test_special_methods_read_on_their_own(name, value):
    sensor = Sensor()
    guard = guard_of(lambda: (sensor * 2.0, sum(sensor), [0.0] * sensor.count, range(sensor), sensor.level()))
    assert guard.holds()
    setattr(sensor, name, value)
    assert name in guard.changed()


def test_a_program_calls_its_base_class(monkeypatch):
    class Loud(Walk):
        gain = 2.0

        def reward(self, state, action, context):
            return super().reward(state, action, context) * self.gain

    guard = model_guard(model := Loud())
    assert guard.holds()
    monkeypatch.setattr(Walk, "reward", lambda self, state, action, context: state)
    assert guard.changed() == "Walk.reward"
    monkeypatch.undo()
    assert guard.holds()
    monkeypatch.setattr(Loud, "gain", 3.0)
    assert not guard.holds()
    del model


def test_context_managers_and_generators():
    level = [1.0]

    @contextlib.contextmanager
    def raised():
        yield level[0]

    def steps():
        yield from level

    def program():
        with raised() as x:
            return x + sum(steps())

    guard = guard_of(program)
    assert guard.holds()
    level[0] = 2.0
    assert not guard.holds()


def test_distributions_of_a_user():
    class Sharp(dist.Normal):
        def log_prob(self, value):
            return super().log_prob(value) * NOISES["sharp"]

    class Sharpened(Walk):
        def observation(self, state, action, context):
            pyro.sample("z", Sharp(state, 1.0), obs=state)

    def program():
        poutine.trace(lambda: watching_run(model)).get_trace().compute_log_prob()
        Sharp(0.0, 1.0).log_prob(WEIGHTS)

    model = Sharpened()
    guard = guard_of(program)
    assert guard.holds()
    NOISES["sharp"] = 3.0
    assert not guard.holds()
    NOISES["sharp"] = 2.0
    assert guard.holds()


def test_attributes_that_were_not_there():
    box = Box(1)
    guard = guard_of(lambda: getattr(box, "offset", 0.0))
    box.offset = 1.0
    assert not guard.holds()


def test_attributes_that_a_library_reads_for_the_program():
    class Mine(nn.Dropout):
        def forward(self, x):
            return super().forward(x)

    module, x = Mine(0.5).eval(), torch.ones(2)
    guard = guard_of(lambda: module(x))
    module.p = 0.25
    assert not guard.holds()
    module.p = 0.5
    assert guard.holds()
    module.train()
    assert not guard.holds()


def test_globals(monkeypatch):
    here = sys.modules[__name__]
    guard = guard_of(lambda: (NOISE, TABLE, WEIGHTS, helper(), constants.NOISE))
    for name, value in (("NOISE", 1.0), ("TABLE", [1.0]), ("WEIGHTS", torch.ones(2)), ("helper", lambda: 2)):
        monkeypatch.setattr(here, name, value)
        assert name in guard.changed()
        monkeypatch.undo()
        assert guard.holds()
    monkeypatch.setattr(constants, "NOISE", 2.0)
    assert "constants.NOISE" in guard.changed()
    monkeypatch.undo()
    TABLE.append(3.0)
    assert not guard.holds()
    TABLE.pop()
    WEIGHTS.data.mul_(2)
    assert not guard.holds()
    WEIGHTS.data.div_(2)
    assert guard.holds()
    monkeypatch.setattr(here, "COUNT", 5)  # which nobody read
    assert guard.holds()


constants.NOISE = 0.5


def test_a_global_that_hides_a_name_of_python(monkeypatch):
    guard = guard_of(lambda: abs(-1.0))
    monkeypatch.setattr(sys.modules[__name__], "abs", lambda x: 2.0, raising=False)
    assert not guard.holds()


def test_modules_that_are_imported_as_the_program_runs(monkeypatch):
    monkeypatch.setitem(sys.modules, "somebodys_constants", module := types.ModuleType("somebodys_constants"))
    module.LEVEL, module.OTHER = 1.0, 2.0

    def program():
        import somebodys_constants as c
        from somebodys_constants import OTHER

        return c.LEVEL + OTHER

    guard = guard_of(program)
    for name in ("LEVEL", "OTHER"):
        monkeypatch.setattr(module, name, 3.0)
        assert not guard.holds()
        monkeypatch.undo()
        monkeypatch.setitem(sys.modules, "somebodys_constants", module)
        assert guard.holds()
    monkeypatch.setitem(sys.modules, "somebodys_constants", types.ModuleType("somebodys_constants"))
    assert not guard.holds()


def test_what_libraries_have_under_a_name(monkeypatch):
    guard = guard_of(lambda: torch.relu(WEIGHTS))
    monkeypatch.setattr(torch, "relu", torch.sigmoid)
    assert not guard.holds()


def test_equal_code_of_two_files():
    first, second = ({"LEVEL": 1.0, "__name__": name} for name in ("first", "second"))
    for namespace in (first, second):
        exec("def program():\n    return LEVEL", namespace)
    assert first["program"].__code__ == second["program"].__code__
    one, other = first["program"], second["program"]
    guard = guard_of(lambda: (one(), other()))
    second["LEVEL"] = 2.0
    assert guard.changed() == "second.LEVEL"


def test_closures():
    level, noise = 1.0, [1.0]

    def program():
        return level, noise

    guard = guard_of(program)
    level = 2.0
    assert "level" in guard.changed()
    level = 1.0
    assert guard.holds()
    noise[0] = 2.0
    assert not guard.holds()


def test_closures_of_functions_that_are_called():
    add = adder(1.0)
    guard = guard_of(lambda: add(2.0))
    add.__closure__[0].cell_contents = 2.0
    assert not guard.holds()


@pytest.mark.parametrize(
    "change",
    [
        _set("__defaults__", (2.0,)),
        _set("__defaults__", None),
        _set("__kwdefaults__", {"y": 3.0}),
        lambda f: f.__kwdefaults__.update(y=3.0),
        _set("scale", 2.0),
    ],
)
def test_defaults_and_code(change):
    def called(x=1.0, *, y=2.0):
        return x * y * getattr(called, "scale", 1.0)

    guard = guard_of(lambda: called())
    assert guard.holds()
    change(called)
    assert not guard.holds()


def test_other_code(monkeypatch):
    guard = guard_of(lambda: helper())
    monkeypatch.setattr(helper, "__code__", (lambda x=1.0, *, y=2.0: x - y).__code__)
    assert "code" in guard.changed()


def test_mutable_defaults():
    table = [1.0]

    def called(x=table):
        return x[0]

    guard = guard_of(lambda: called())
    table[0] = 2.0
    assert not guard.holds()


def test_wrapped_functions():
    scale = [2.0]

    @torch.no_grad()
    def program(x=WEIGHTS):
        return x * scale[0]

    @functools.wraps(program)
    def outer():
        return program()

    guard = guard_of(outer)
    scale[0] = 3.0
    assert not guard.holds()


def test_functions_that_libraries_call():
    scale = [2.0]
    guard = guard_of(lambda: sorted([1.0, 2.0], key=lambda x: x * scale[0]))
    scale[0] = 3.0
    assert not guard.holds()


def test_torch_defaults():
    guard = guard_of(lambda: torch.zeros(()))
    with torch.device("meta"):
        assert not guard.holds()
    torch.set_default_dtype(torch.float64)
    try:
        assert "dtype" in guard.changed()
    finally:
        torch.set_default_dtype(torch.float32)
    assert guard.holds()


# --------------------------------------------------------------------------------- models and parameters


class Learned(Walk):
    """Parameters, buffers, submodules and a prior, all of which are read."""

    def __init__(self):
        super().__init__()
        self.scale = PyroParam(torch.tensor(2.0), constraints.positive)
        self.shift = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("table", torch.tensor([1.0, 2.0]))
        self.net = nn.Linear(1, 1)
        self.inner = PyroModule[nn.Linear](1, 1)
        self.level = PyroSample(lambda self: dist.Normal(self.width, 1.0))
        self.width = 1.0
        self.lock, self.log, self.unread = threading.Lock(), LOG, [1]

    def observation(self, state, action, context):
        mean = self.net(state[..., None])[..., 0] + self.inner(state[..., None])[..., 0] + self.level
        pyro.sample("z", dist.Normal(mean + self.shift * self.table[context], self.scale))


MODELS = (
    *(LightDark, ContextualTiger, LineGrid, Beacons, Clinic, Machine, Robot, Well, Walk, Learned),
    pytest.param(Plates, marks=pytest.mark.slow),  # the first plate takes Pyro some time
)


@pytest.mark.parametrize("kind", MODELS)
def test_models_hold_and_change(kind):
    model = kind()
    guard = model_guard(model)
    assert guard.holds()
    run(model)
    assert guard.changed() is None
    model.initial = lambda context: torch.zeros(())
    assert not guard.holds()
    del model.initial
    assert guard.holds()


@pytest.mark.parametrize("name", ["step", "process_variance", "light_variance", "dark_variance", "goal"])
def test_constants_of_light_dark(name):
    model = LightDark()
    guard = model_guard(model)
    value = getattr(model, name)
    for other in (value + 1, torch.tensor(value), PyroParam(torch.tensor(value))):
        setattr(model, name, other)
        assert not guard.holds()
        delattr(model, name)
        setattr(model, name, value)
        assert guard.holds()
    model.horizon = 3  # which no program reads
    assert guard.holds()


CHANGES = {
    "a parameter's value": lambda m: m.scale_unconstrained.data.add_(1),
    "a parameter's value by name": _set("scale", torch.tensor(3.0)),
    "a parameter's constraint": _set("scale", PyroParam(torch.tensor(2.0), constraints.greater_than(1.0))),
    "a parameter is a number": lambda m: (delattr(m, "scale"), setattr(m, "scale", 2.0)),
    "a torch parameter's value": lambda m: m.shift.data.add_(1),
    "another torch parameter": _set("shift", nn.Parameter(torch.tensor(2.0))),
    "a buffer in place": lambda m: m.table.add_(1),
    "another buffer": _set("table", torch.tensor([1.0, 3.0])),
    "no buffer": lambda m: delattr(m, "table"),
    "a weight": lambda m: m.net.weight.data.add_(1),
    "a weight of a Pyro module": lambda m: m.inner.weight.data.add_(1),
    "another submodule": _set("net", nn.Linear(1, 1)),
    "a prior": _set("level", PyroSample(dist.Normal(0.0, 1.0))),
    "what a prior reads": _set("width", 2.0),
    "the class": _set("__class__", type("Other", (Learned,), {})),
    "an attribute in the way of a parameter": lambda m: m.__dict__.update(scale=1.0),
    "all attributes": _set("__dict__", {}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_a_model(name):
    model = Learned()
    guard = model_guard(model)
    assert guard.holds()
    CHANGES[name](model)
    assert not guard.holds()
    assert guard.changed()


def test_a_module_with_a_lock_is_called():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lock, self.gain = threading.Lock(), 2.0

        def forward(self, x):
            return x * self.gain

    net = Net()
    guard = guard_of(lambda: net(ONE))
    net.lock = threading.Lock()
    assert guard.holds()
    net.register_forward_hook(lambda *_: ONE)
    assert not guard.holds()


@pytest.mark.parametrize("register", [nn.Module.register_buffer, nn.Module.register_parameter])
def test_tensors_that_were_not_there(register):
    class Offset(Walk):
        def reward(self, state, action, context):
            return state + getattr(self, "offset", 0.0)

    model = Offset()
    guard = model_guard(model)
    register(model, "offset", nn.Parameter(torch.ones(1)))
    assert guard.changed().endswith("Offset.offset, which is new")


def test_what_no_program_mentions_may_change():
    model = Learned()
    guard = model_guard(model)
    model.unread.append(2)
    model.lock, model.more = threading.Lock(), 1
    assert guard.holds()


INPUTS_KEPT = {
    "a parameter's value": CHANGES["a parameter's value"],
    "another torch parameter": CHANGES["another torch parameter"],
    "a weight": CHANGES["a weight"],
    "a new parameter under the same constraint": _set(
        "scale", PyroParam(torch.tensor(5.0), constraints.positive)
    ),
}
INPUTS_CHANGED = {
    "a buffer": CHANGES["a buffer in place"],
    "a constraint": CHANGES["a parameter's constraint"],
    "a shape": _set("shift", nn.Parameter(torch.ones(2))),
    "a type": _set("shift", nn.Parameter(torch.tensor(1.0).double())),
    "no parameter": lambda m: delattr(m, "shift"),
    "a number": CHANGES["a parameter is a number"],
}


@pytest.mark.parametrize("name", [*INPUTS_KEPT, *INPUTS_CHANGED])
def test_inputs_count_by_shape_and_type(name):
    model = Learned()
    guard = model_guard(model, inputs=[id(each) for each in model.parameters()])
    assert guard.holds()
    {**INPUTS_KEPT, **INPUTS_CHANGED}[name](model)
    assert guard.holds() == (name in INPUTS_KEPT)


def test_the_param_store():
    model, store = Learned(), pyro.get_param_store()
    with isolated(0):
        guard = model_guard(model)
        assert guard.holds()
        with poutine.block(), model.running():
            assert float(model.scale.detach()) == pytest.approx(2.0)  # which writes it to the store
        assert guard.holds()
        store["scale"] = torch.tensor(3.0)  # which the model will read from there
        assert "scale" in guard.changed()


def test_programs_that_read_the_param_store():
    with isolated(0):
        pyro.param("level", torch.tensor(1.0))
        guard = guard_of(lambda: pyro.param("level"))
        assert guard.holds()
        pyro.get_param_store()["level"] = torch.tensor(2.0)
        assert not guard.holds()
    with isolated(0):
        assert not guard.holds()  # it is gone


def test_a_model_reads_its_contexts_through_the_base_class():
    class Counting(Walk):
        def reward(self, state, action, context):
            return state * self.num_contexts

    model = Counting()
    guard = model_guard(model)
    model.contexts = 3
    assert not guard.holds()


def test_the_guard_keeps_no_model():
    model = Learned()
    model.itself = model.observation
    guard, reference = model_guard(model), weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    assert not guard.holds()


def test_broken_objects_do_not_raise():
    class Broken:
        def __eq__(self, other):
            raise RuntimeError("no")

        __hash__ = None

        def __getattribute__(self, name):
            raise RuntimeError("no")

    box = Box([1.0])
    guard = guard_of(lambda: box.value)
    for value in (Broken(), [Broken()], torch.zeros(1, device="meta"), np.array([None])):
        box.value = value
        assert not guard.holds()
        assert guard.changed()
    box.__dict__ = {}
    assert not guard.holds()


# ------------------------------------------------------------------------------------------- what is refused


def generator():
    yield 1


@functools.lru_cache
def cached():
    return torch.ones(2)


REFUSED = {
    "the time": (lambda: time.time(), "time"),
    "a clock by another name": (lambda: CLOCK(), "CLOCK"),
    "a date": (lambda: datetime.datetime.now(), "datetime"),
    "the environment": (lambda: os.environ.get("HOME"), "os"),
    "random numbers of Python": (lambda: random.random(), "random"),
    "random numbers of NumPy": (lambda: np.random.rand(), "random"),
    "a generator of NumPy": (lambda: GENERATOR.normal(), "GENERATOR"),
    "a file": (lambda: open("/dev/null").close(), "open"),
    "code from text": (lambda: eval("1"), "eval"),
    "all globals": (lambda: globals()["NOISE"], "globals"),
    "a cache": (lambda: cached(), "cached"),
    "a logger": (lambda: LOG.debug("now"), "LOG"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_answers_differently_is_refused(name):
    program, word = REFUSED[name]
    with pytest.raises(Unguardable, match=word):
        guard_of(program)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "value",
    [
        *(iter([1]), itertools.count(), generator(), threading.Lock(), random.Random(0), torch.Generator()),
        *(torch.zeros(1, device="meta"), np.array([None]), torch.zeros(1).as_subclass(Subclass), zip([1])),
        *(GENERATOR, threading.local(), np.random.normal, functools.lru_cache(helper)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_objects_that_change_unseen_are_refused(value):
    box = Box([value])
    with pytest.raises(Unguardable, match=r"value\[0\](\[0\])?, which .*<lambda> reads"):
        guard_of(lambda: box.value)


def test_a_list_of_itself_is_refused():
    loop = []
    loop.append(loop)
    box = Box(loop)
    with pytest.raises(Unguardable, match="contains itself"):
        guard_of(lambda: box.value)


def _stateful():
    box, table, tensor, last = Box(0), [0], torch.zeros(2), Box(torch.zeros(()))
    box.n, box.later, box.sub = 0, None, Box(0)
    count, queue, weight = counter(), collections.deque([1, 2]), nn.Parameter(torch.zeros(2))

    def add():
        box.sub.value += 1

    def default(seen=table):
        seen.append(1)

    def shared():
        type(box).shared = type(box).shared + 1

    def global_count():
        global COUNT
        COUNT += 1

    def attribute():
        attribute.calls = getattr(attribute, "calls", 0) + 1

    return {
        "an attribute": lambda: setattr(box, "n", box.n + 1),
        "an attribute of an object below": add,
        "a list": lambda: table.append(1),
        "a default": default,
        "a tensor in place": lambda: tensor.add_(1),
        "a parameter in place": lambda: weight.data.add_(1),
        "an equal tensor instead": lambda: setattr(last, "value", torch.zeros(())),
        "a cell": lambda: count(),
        "a class": shared,
        "a global": global_count,
        "a queue": lambda: queue.rotate(),
        "a function": attribute,
        "an attribute that is new": lambda: setattr(box, "novel", 1),
        "one that is deleted": lambda: delattr(box, "later"),
    }


@pytest.mark.parametrize("name", _stateful())
def test_a_state_of_its_own_is_refused(name, monkeypatch):
    monkeypatch.setattr(Box, "shared", 1.0)
    with pytest.raises(Unguardable, match="state of its own"):
        guard_of(_stateful()[name])


def test_a_model_that_counts_is_refused():
    class Counting(Walk):
        calls = 0

        def reward(self, state, action, context):
            self.calls += 1
            return state

    with pytest.raises(Unguardable, match=r"Counting\.calls.* state of its own"):
        model_guard(Counting())


def test_objects_that_are_built_inside_are_no_state():
    class Builder:
        def __init__(self):
            self.parts, self.n = [], 0

        def add(self, part):
            self.parts.append(part)
            self.n += 1
            return self

    class Double(dist.Normal):
        def log_prob(self, value):
            return 2 * super().log_prob(value)

    class Building(Walk):
        def reward(self, state, action, context):
            builder = Builder().add(1.0).add(self.gain)
            return state * sum(builder.parts) * builder.n

        def observation(self, state, action, context):
            fn = Double(state, 1.0)
            pyro.sample("z", fn, obs=fn.loc)
            fn.expand((2, 1, 1)).log_prob(state)

    model = Building()
    model.gain = 2.0
    guard = model_guard(model)
    run(model)
    assert guard.holds()
    model.gain = 3.0
    assert not guard.holds()


def test_objects_that_are_built_inside_may_go():
    class Sharp(dist.Normal):
        def log_prob(self, value):
            return 2 * super().log_prob(value)

    class Sharpened(Walk):
        def observation(self, state, action, context):
            pyro.sample("z", Sharp(state, 1.0))

    model, zero = Sharpened(), torch.zeros(())
    with isolated(0), Watch() as watch, model.running():
        trace = poutine.trace(model.observation).get_trace(zero, zero, zero)
        trace.compute_log_prob()  # from outside of any program
    guard = watch.guard()
    del trace, watch
    gc.collect()
    assert guard.changed() is None


def test_random_numbers_that_a_library_draws_are_refused():
    import statistics

    normal = statistics.NormalDist()
    with pytest.raises(Unguardable, match="random"):
        guard_of(lambda: normal.samples(1))


# ------------------------------------------------------------------------------------------- the watch itself


def test_a_profiler_goes_on():
    seen = []

    def profiler(frame, event, arg):
        seen.append(frame.f_code.co_name)

    sys.setprofile(profiler)
    try:
        with Watch() as watch:
            helper()
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert "helper" in seen
    assert watch.guard().holds()


def test_a_profiler_in_c_is_set_again():
    profile = cProfile.Profile()
    profile.enable()
    try:
        with Watch() as watch:
            helper()
        adder(1)
    finally:
        profile.disable()
    assert watch.guard().holds()
    assert any(entry.code is adder.__code__ for entry in profile.getstats())


def test_the_profiler_is_restored_if_a_program_fails():
    def fails():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), Watch():
        fails()
    assert sys.getprofile() is None


def test_a_program_that_sets_a_profiler_is_refused():
    with Watch() as watch:
        sys.setprofile(None)
    with pytest.raises(Unguardable, match="profiler"):
        watch.guard()


@pytest.mark.slow  # torch prepares its first mode
def test_values_are_looked_at_unseen_by_modes():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        calls = ()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.calls = (*self.calls, str(function))
            return function(*args, **(kwargs or {}))

    weights = torch.ones(2, requires_grad=True)
    with Watch() as watch, Recorder() as recorder:
        (lambda: weights * 2)()
    assert [call for call in recorder.calls if "mul" not in call] == []
    assert watch.guard().holds()


def test_an_abstract_model_is_a_class_as_any(monkeypatch):
    model = Walk()
    guard = model_guard(model)
    monkeypatch.setattr(CPOMDP, "initial", lambda self, context: torch.zeros(()))
    assert guard.changed() == "CPOMDP.initial"
