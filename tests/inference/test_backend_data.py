"""Backends as plain data, as files have them."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest

from cpomdp_ppl.experiments.files import jsonable
from cpomdp_ppl.inference import (
    ExtendedKalmanFilter,
    GridFilter,
    ObservableOperator,
    ParticleFilter,
    UnscentedKalmanFilter,
)
from cpomdp_ppl.inference.choice import backend_as_data, backend_from_data

OURS = [
    ParticleFilter(),
    ParticleFilter(num_particles=np.int64(9), guide="ekf", chunk=3, common_random_numbers=False),
    ExtendedKalmanFilter(reward_points=5),
    UnscentedKalmanFilter(alpha=0.5, kappa=None),
    ObservableOperator(),
    GridFilter(50, bounds=((0.0, 1.0), (2, 3))),
]


@pytest.mark.parametrize("backend", OURS, ids=lambda backend: type(backend).__name__)
def test_there_and_back(backend):
    data = json.loads(json.dumps(backend_as_data(backend)))
    again = backend_from_data(data)
    assert type(again) is type(backend)
    assert jsonable(again) == jsonable(backend)  # pairs are lists now
    assert again.label == backend.label


class Kind(ParticleFilter):
    """A kind of particle filter."""


@dataclass
class Guide:
    """A guide whose description looks like any other."""

    def transition(self, state, action, context, observations, observed):
        raise NotImplementedError


@pytest.mark.parametrize("backend", [Kind(), ParticleFilter(guide=Guide()), ParticleFilter(resampling=print)])
def test_what_is_somebodys_own_is_no_data(backend):
    assert backend_as_data(backend) is None


@pytest.mark.parametrize(
    "data",
    [
        None,
        3,
        "smc",
        [],
        {},
        {"": 3},
        {"": ["ParticleFilter"]},
        {"": "ParticleFilter", 1: 2},
        {"num_particles": 9},
    ],
)
def test_what_describes_no_backend(data):
    with pytest.raises(ValueError, match="likelihood: expected"):
        backend_from_data(data)
