"""A state that is one real number, filtered by hand: sums over the points of a dense line, in numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable

    from cpomdp_ppl import Episodes

Reals = NDArray[np.float64]


def normal(x: Reals | float, mean: Reals | float, sd: float) -> Reals:
    """The density of a normal distribution."""
    density: Reals = np.exp(-0.5 * ((x - mean) / sd) ** 2) / (sd * np.sqrt(2 * np.pi))
    return density


@dataclass(frozen=True)
class Found:
    """What is known of one episode under one context, in hindsight and before.

    Attributes:
        increments: `log p(o_{t+1} | h_t, a_t)`, `[T]`; zero after the end.
        rewards: `E[r_t | h_t, a_t]`, `[T]`; zero after the end.
        mean: `E[s_t | h_t]`, `[T + 1]`.
        variance: Its variance, `[T + 1]`.
        smoothed: `E[s_t | h_T]`, `[T + 1]`.
    """

    increments: Reals
    rewards: Reals
    mean: Reals
    variance: Reals
    smoothed: Reals


@dataclass(frozen=True)
class Line:
    """The programs of a model under one context, as densities on points x `[G]` in the middle of cells.

    Attributes:
        x: The points.
        initial: `p(s_0)`, `[G]`.
        move: `p(s' | s, a)`, `[G, G]`, of an action.
        sight: `p(o | s', a)` `[G]`, of an action and what was seen, None for what was not.
        reward: `r(s, a, s')`, broadcasts to `[G, G]`, of an action.
    """

    x: Reals
    initial: Reals
    move: Callable[[Reals], Reals]
    sight: Callable[[Reals, dict[str, Reals | None]], Reals]
    reward: Callable[[Reals], Reals]

    def filter(self, episodes: Episodes, b: int) -> Found:
        """Forwards and backwards through one episode."""
        h, T, length = self.x[1] - self.x[0], episodes.horizon, int(episodes.lengths[b])
        p = self.initial * h
        beliefs, moves, sights = [p / p.sum()], [], []
        increments, rewards = np.zeros(T), np.zeros(T)
        for t in range(length):
            action = episodes.actions[b, t].double().numpy()
            seen = {
                site: values[b, t].double().numpy() if bool(episodes.observed[site][b, t].all()) else None
                for site, values in episodes.observations.items()
            }
            moves.append(self.move(action) * h)
            sights.append(self.sight(action, seen))
            rewards[t] = beliefs[-1] @ (moves[-1] * self.reward(action)).sum(1)
            p = (beliefs[-1] @ moves[-1]) * sights[-1]
            increments[t] = np.log(p.sum())
            beliefs.append(p / p.sum())
        later, smoothed = np.ones_like(p), [beliefs[-1]]
        for belief, move, sight in zip(beliefs[-2::-1], moves[::-1], sights[::-1], strict=True):
            later = move @ (sight * later)
            smoothed.append(belief * later / (belief @ later))
        still = T - length
        beliefs, smoothed = beliefs + [beliefs[-1]] * still, smoothed[::-1] + [beliefs[-1]] * still
        mean = np.array(beliefs) @ self.x
        variance = np.array(beliefs) @ self.x**2 - mean**2
        return Found(increments, rewards, mean, variance, np.array(smoothed) @ self.x)
