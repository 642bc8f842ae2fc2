"""The four problems: nothing is wrong with them, particles agree with the truth, and rules beat chance."""

import numpy as np
import pytest
import torch
from scipy.special import expit
from scipy.stats import binom, norm, poisson

from cpomdp_command import main
from cpomdp_ppl import RandomPolicy, simulate
from cpomdp_ppl.inference import GridFilter, ObservableOperator, ParticleFilter
from examples.problems import clinic, machine, robot, well

PROBLEMS = {clinic: clinic.Clinic, machine: machine.Machine, robot: robot.Robot, well: well.Well}


def by_quadrature(model, episodes):
    """Likelihoods in the clinic, [B, C]: severity on a fine lattice, with and without an allergy."""
    x = np.arange(-4.0, 6.0, 0.05)
    level = {True: -1.0, False: 2.0}
    moves = {h: norm.pdf(x[:, None], m + 0.7 * (x - m), 0.3) * 0.05 for h, m in level.items()}
    found = np.zeros((len(episodes), 3))
    for b, c in np.ndindex(found.shape):
        belief = np.stack([norm.pdf(x, 2.0, 0.5) * 0.05, 0 * x])  # [allergic, x]
        for t, action in enumerate(episodes.actions[b].tolist()):
            seen = {name: float(each[b, t]) for name, each in episodes.observations.items()}
            treated = action in (clinic.TREAT_A, clinic.TREAT_B)
            belief = belief @ moves[treated and action == c + clinic.TREAT_A].T
            fell = 0.03 * treated * belief[0]
            belief = belief + np.stack([-fell, fell])
            belief = belief * binom.pmf(seen["bad_nights"], 7, expit(x - 1))
            if action == clinic.TEST:
                belief = belief * poisson.pmf(seen["cells"], 10 * np.exp(x))
            if treated:
                belief = belief * binom.pmf(seen["rash"], 1, np.array([[0.05], [0.8]]))
        found[b, c] = np.log(belief.sum())
    return torch.as_tensor(found)


def by_signed_mixtures(model, episodes):
    """Likelihoods of the robot's looks, [B, C], exactly.

    The chance of detection is a Gaussian of the position, so that a belief that was a Gaussian is one after a
    detection, and after none the difference of two. All have covariances v·I.
    """
    stations, compass = robot.STATIONS.double().numpy(), robot.COMPASS.double().numpy()
    found = np.zeros((len(episodes), 16))
    for b, c in np.ndindex(found.shape):
        station, w, m, v = stations[c // 4], np.ones(1), np.zeros((1, 2)), np.full(1, 0.09)
        for t, action in enumerate(episodes.actions[b].tolist()):
            m, v = m + 0.15 * compass[c % 4] + (compass[action] if action < robot.LOOK else 0), v + 0.01
            if action != robot.LOOK:
                continue
            near = 0.95 * 18 * np.pi * product(m, v, station, 9.0)[0] * w
            m_near, v_near = product(m, v, station, 9.0)[1:]
            if episodes.observations["detected"][b, t] == 1:
                position = station - episodes.observations["offset"][b, t].double().numpy()
                density, m, v = product(m_near, v_near, position, 0.09)
                w = near * density
            else:
                w, m, v = np.append(w, -near), np.concatenate([m, m_near]), np.append(v, v_near)
        found[b, c] = np.log(w.sum())
    return torch.as_tensor(found)


def product(m, v, point, variance):
    """N(x; m, vI) N(x; point, variance I) = density · N(x; mean, new I) in the plane: those three."""
    total = v + variance
    density = np.exp(-((m - point) ** 2).sum(-1) / (2 * total)) / (2 * np.pi * total)
    new = v * variance / total
    return density, new[:, None] * (m / v[:, None] + point / variance), new


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: PROBLEMS[problem].__name__)
def test_nothing_is_wrong_with_it(problem, capsys):
    assert main(["check", f"{problem.__file__}:{PROBLEMS[problem].__name__}"]) == 0
    assert "no faults" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "horizon", "num_particles", "exactly"),
    [
        (clinic, 8, 4000, by_quadrature),
        (machine, 8, 1000, lambda *given: ObservableOperator().run(*given).log_likelihood),
        (robot, 6, 1000, by_signed_mixtures),
        (well, 5, 1000, lambda *given: GridFilter(300).run(*given).log_likelihood),
    ],
    ids=["Clinic", "Machine", "Robot", "Well"],
)
def test_particles_agree_with_what_is_exact(problem, horizon, num_particles, exactly):
    """Likelihoods by particles are unbiased: over independent runs, their mean is the truth within 5 s.e."""
    model, runs = PROBLEMS[problem](), 16
    model.horizon = horizon
    episodes = simulate(model, problem.rule, 3, seed=1)
    truth = exactly(model, episodes)  # [B, C]
    repeated = episodes[torch.arange(3).repeat(runs)]
    found = ParticleFilter(num_particles).run(model, repeated, seed=0).log_likelihood.unflatten(0, (runs, 3))
    ratios = (found - truth).exp()[:, (truth + model.prior().log()).softmax(1) > 0.05]
    assert ratios.shape[1] >= 3  # each episode's likely contexts
    errors = ratios.std(0) / runs**0.5
    assert ((ratios.mean(0) - 1).abs() < 5 * errors + 1e-3).all()  # 1e-3: of quadrature and grid
    assert (errors < 0.1).all()  # so that it means something


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: PROBLEMS[problem].__name__)
def test_the_rule_earns_more_than_chance(problem):
    model, n = PROBLEMS[problem](), 600
    rule, chance = (
        simulate(model, policy, n, seed=0).returns
        for policy in (problem.rule, RandomPolicy(model.num_actions))
    )
    assert rule.mean() - chance.mean() > 5 * ((rule.var() + chance.var()) / n).sqrt()
