"""C-IDS on LightDark as one would write it for this one model: plain torch, time first, no checks.

It does what `Learner` of `solvers.cids.learner` does with the EKF, `Information` and `ActorCritic`.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

T, A, UNITS = 20, 3, 64
PROCESS, LIGHT, DARK, INITIAL, GOAL = 0.1, 1.0, 8.0, 0.09, 1.0
SIDE = torch.tensor([1.0, -1.0])  # [C]: where the light is
MOVE = torch.tensor([-1.0, 1.0, 0.0])  # [A]
ONE_HOT = torch.eye(A + 1)  # of the previous action; class 0 is none yet
EPOCHS, TRACE, CLIP, VALUE, MIXED, LONGEST, DRIFT = 3, 0.95, 0.2, 0.5, 1e-3, 1.0, 0.02
AHEAD = torch.arange(T) - torch.arange(T)[:, None]  # [T, T]: how far a later step (column) is
DISCOUNT = torch.where(AHEAD >= 0, TRACE ** AHEAD.clamp(min=0), 0.0)


class Network(nn.Module):
    """Policy and critic on one LSTM.

    Args:
        shift: Subtracted from what is seen.
        scale: Divided by, after that.
    """

    def __init__(self, shift: float, scale: float) -> None:
        super().__init__()
        self.shift, self.scale = shift, scale
        self.lstm = nn.LSTM(A + 4, UNITS)
        self.logits = nn.Linear(UNITS, A)
        self.value = nn.Linear(UNITS, 1)
        self.context = nn.Linear(UNITS, 2)
        self.state = nn.Linear(UNITS, 1)
        self.mean, self.spread = torch.zeros(()), torch.ones(())  # units of the values
        nn.init.orthogonal_(self.logits.weight, gain=0.1)
        nn.init.zeros_(self.logits.bias)

    def forward(self, inputs: Tensor, chance: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log-probabilities of actions `[T, B, A]` and contexts `[T, B, C]`, values and states `[T, B]`."""
        hidden, _ = self.lstm(inputs)
        logits = self.logits(hidden)
        if chance:
            log_policy = ((1 - chance) * logits.softmax(-1) + chance / A).log()
        else:
            log_policy = logits.log_softmax(-1)
        value = self.mean + self.spread * self.value(hidden).squeeze(-1)
        return log_policy, value, self.context(hidden).log_softmax(-1), self.state(hidden).squeeze(-1)

    @torch.no_grad()
    def rescale(self, targets: Tensor, weight: float) -> None:
        """Move the values' units, and keep the values."""
        mean, spread = self.mean.clone(), self.spread.clone()
        self.mean.lerp_(targets.mean(), weight)
        self.spread.lerp_(targets.std(), weight)
        self.value.weight.mul_(spread / self.spread)
        self.value.bias.mul_(spread).add_(mean - self.mean).div_(self.spread)


def encode(net: Network, a: Tensor, z: Tensor) -> Tensor:
    """Inputs `[T, B, A + 4]` of the network along episodes `[T, B]`."""
    inputs = blank(a.shape[1])
    inputs[1:, :, : A + 1] = ONE_HOT[a[:-1] + 1]
    inputs[1:, :, A + 2] = a[:-1] == 2
    inputs[1:, :, A + 3] = (z[:-1] - net.shift) / net.scale * (a[:-1] == 2)
    return inputs


def blank(B: int) -> Tensor:
    """Inputs of nothing but times: previous action, time, whether something was seen, and what."""
    inputs = torch.zeros(T, B, A + 4)
    inputs[0, :, 0] = 1
    inputs[:, :, A + 1] = (torch.arange(T) / T)[:, None]
    return inputs


@torch.no_grad()
def rollout(net: Network, c: Tensor, chance: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Inputs `[T, B, A + 4]`; states, actions, observations and rewards `[T, B]`, in contexts `[B]`."""
    B, side = len(c), SIDE[c]
    weights, W, b = net.lstm.all_weights[0], net.logits.weight.T, net.logits.bias
    process, sensor = PROCESS**0.5 * torch.randn(T, B), torch.randn(T, B)
    gumbel = torch.empty(T, B, A).exponential_().log_()  # minus Gumbel noise: `multinomial` is slower
    random, anything = torch.rand(T, B) < chance, torch.randint(A, (T, B))
    inputs = blank(B)
    h = m = torch.zeros(B, UNITS)
    x, states, actions, seen = INITIAL**0.5 * torch.randn(B), [], [], []
    for t in range(T):
        h, m = torch.lstm_cell(inputs[t], (h, m), *weights)
        a = (torch.addmm(b, h, W) - gumbel[t]).argmax(1)
        if chance:
            a = torch.where(random[t], anything[t], a)
        states.append(x)
        move, observe = MOVE[a], a == 2
        x = torch.addcmul(x + move, move.abs(), process[t])
        sd = torch.where(side * x > 0, LIGHT**0.5, DARK**0.5)
        z = torch.addcmul(x, sd, sensor[t]) * observe
        actions.append(a)
        seen.append(z)
        if t + 1 < T:
            inputs[t + 1, :, : A + 1] = ONE_HOT[a + 1]
            inputs[t + 1, :, A + 2] = observe
            inputs[t + 1, :, A + 3] = (z - net.shift) / net.scale * observe
    path = torch.stack(states)
    depth = side * path
    rewards = (depth > GOAL).float() - (depth < 0).float()
    return inputs, path, torch.stack(actions), torch.stack(seen), rewards


@torch.no_grad()
def filtered(a: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """`log p(o_{t+1} | h_t, a_t, c)` and `E[r_c(s_t) | h_t]`, `[T, C, B]`, of episodes `[T, B]`, by EKF."""
    B, side = a.shape[1], SIDE[:, None]
    move, observe = MOVE[a], (a == 2).float()
    noise = PROCESS * move.abs()
    mu, P = torch.zeros(2, B), torch.full((2, B), INITIAL)
    means, variances, innovations, spreads = [], [], [], []
    for t in range(T):
        means.append(mu)
        variances.append(P)
        mu, P = mu + move[t], P + noise[t]
        S = P + torch.where(side * mu > 0, LIGHT, DARK)
        e = z[t] - mu
        K = observe[t] * P / S
        mu, P = torch.addcmul(mu, K, e), P - K * P
        innovations.append(e)
        spreads.append(S)
    e, S = torch.stack(innovations), torch.stack(spreads)  # [T, C, B]
    increments = -0.5 * observe[:, None] * (e * e / S + S.log() + math.log(2 * math.pi))
    m, sd = side * torch.stack(means), torch.stack(variances).mul_(2).sqrt_()
    # P(depth > goal) − P(depth < 0)
    return increments, 0.5 * (torch.erf((m - GOAL) / sd) + torch.erf(m / sd))


def assess(c: Tensor, increments: Tensor, expected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Posterior `[T + 1, C, B]`, belief rewards `[T, B]` and what each step told of the context `[T, B]`."""
    joint = torch.cat([torch.zeros_like(increments[:1]), increments]).cumsum(0)
    posterior = joint.softmax(1)
    rewards = (posterior[:-1] * expected).sum(1)
    p = posterior.gather(1, c.expand(T + 1, 1, -1)).squeeze(1)
    return posterior, rewards, ((1 - MIXED) * p + MIXED / 2).log().diff(dim=0)


def loss(
    net: Network,
    now: tuple[Tensor, Tensor, Tensor, Tensor],
    a: Tensor,
    before: Tensor,
    advantages: Tensor,
    targets: Tensor,
    posterior: Tensor,
    states: Tensor,
    exploration: float,
) -> Tensor:
    """PPO's, the critic's three, and the entropy's; `now` is what the network says along the episodes."""
    log_policy, values, log_contexts, guess = now
    ratio = (log_policy.gather(2, a[..., None]).squeeze(2) - before).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    policy = -torch.minimum(ratio * advantages, clipped * advantages).mean()
    value = VALUE * ((values - targets) / net.spread).square().mean()
    context = -(posterior * log_contexts).sum(-1).mean()
    entropy = -(log_policy.exp() * log_policy).sum(-1).mean()
    state = (guess - states).square().mean()
    return policy + value + context + state - exploration * entropy


def standardised_advantages(payoffs: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """GAE in units of its size, and the critic's targets, `[T, B]`."""
    after = torch.cat([values[1:], torch.zeros_like(values[:1])])
    advantages = DISCOUNT @ (payoffs + after - values)
    return advantages / advantages.square().mean().sqrt(), advantages + values


class Peer:
    """A fit, by hand.

    Args:
        net: What is learned.
        iterations: How many there will be.
        batch_size: Episodes in each.
        chance: How often an action is random, by progress.
    """

    def __init__(
        self, net: Network, iterations: int, batch_size: int, chance: Callable[[float], float]
    ) -> None:
        self.net, self.iterations, self.B, self.chance, self.k = net, iterations, batch_size, chance, 0
        self.weights = list(net.parameters())
        self.optimizer = torch.optim.Adam(self.weights, fused=True)

    def iterate(self) -> dict[str, float]:
        """Play, filter, improve; what was measured."""
        progress = self.k / (self.iterations - 1)
        chance = self.chance(progress)
        tau = 3.0 * (0.5 / 3.0) ** min(progress / 0.7, 1.0)
        started = time.perf_counter()
        c = (torch.arange(self.B) >= self.B / 2).long()
        inputs, path, a, z, rewards = rollout(self.net, c, chance)
        measured = {"return": rewards.sum(0).mean().item()}
        played = time.perf_counter()
        posterior, expected, gain = assess(c, *filtered(a, z))
        left = torch.special.entr(posterior[-1]).sum(0).mean().item()
        measured |= {"entropy": left / math.log(2), "information": math.log(2) - left}
        measured["information_lower"] = gain.sum(0).mean().item()
        done = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = 6e-3 + (3e-4 - 6e-3) * progress
        states = (path - path.mean()) / path.std()
        payoffs = expected + tau * gain
        measured |= self.improve(inputs, a, payoffs, posterior, states, chance, 0.1 * (1 - progress))
        measured["seconds_rollout"] = played - started
        measured["seconds_likelihood"] = done - played
        measured["seconds_gradient"] = time.perf_counter() - done
        self.k += 1
        return measured

    def improve(
        self,
        inputs: Tensor,
        a: Tensor,
        payoffs: Tensor,
        posterior: Tensor,
        states: Tensor,
        chance: float,
        exploration: float,
    ) -> dict[str, float]:
        """Three steps of Adam on a batch."""
        net, to_come = self.net, payoffs.flip(0).cumsum(0)
        if self.k == 0:
            net.rescale(to_come, 1.0)
        now = net(inputs, chance)
        before = now[0].detach().gather(2, a[..., None]).squeeze(2)
        advantages, targets = standardised_advantages(payoffs, now[1].detach())
        answer = posterior[:-1].mT.contiguous()  # [T, B, C]
        for epoch in range(EPOCHS):
            now = now if epoch == 0 else net(inputs, chance)
            self.optimizer.zero_grad()
            total = loss(net, now, a, before, advantages, targets, answer, states, exploration)
            total.backward()
            norm = nn.utils.clip_grad_norm_(self.weights, LONGEST)
            self.optimizer.step()
        net.rescale(to_come, DRIFT)
        return {"objective": payoffs.sum(0).mean().item(), "loss": total.item(), "gradient_norm": norm.item()}
