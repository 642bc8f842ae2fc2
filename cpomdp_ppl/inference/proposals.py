"""How particles move: by the program itself, by a guide, or looking ahead to the coming observation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import pyro.poutine as poutine
import torch
from torch import Tensor

from cpomdp_ppl.actions import some_action
from cpomdp_ppl.errors import DensityError, ModelError
from cpomdp_ppl.handlers import Recorded
from cpomdp_ppl.inference.density import log_density, unmasked
from cpomdp_ppl.inference.gaussian import Reparameterised, Sensed
from cpomdp_ppl.inference.gaussian_belief import block_diagonal
from cpomdp_ppl.inference.observed import Observed, axes
from cpomdp_ppl.inference.sampling import Drawn
from cpomdp_ppl.state import leaves, map_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cpomdp_ppl.inference.backend import Recursion


class Guide(Protocol):
    """Proposal programs, with the same sample sites as the model's own.

    They also see the coming observation, by site as `[1, B, 1, …]`, and whether it is one.
    """

    def initial(
        self, context: Tensor, observations: Mapping[str, Tensor], observed: Mapping[str, Tensor]
    ) -> Any:
        """Propose the sites of the model's `initial`; called only for models with an initial observation."""
        ...

    def transition(
        self,
        state: Any,
        action: Tensor,
        context: Tensor,
        observations: Mapping[str, Tensor],
        observed: Mapping[str, Tensor],
    ) -> Any:
        """Propose the sites of the model's `transition`."""
        ...


class Bootstrap:
    """The model's own programs; the base of all proposals.

    A proposal draws states (which may lack axes), and gives the log-ratio `log p − log q` of its draws,
    `[C, B, N]`; None stands for a ratio of 1.
    """

    def __init__(self, recursion: Recursion, common: bool) -> None:
        self.model, self.context, self.plate_axes = recursion.model, recursion.context, recursion.plate_axes
        self.common = common

    def initial(self, shape: torch.Size, seen: Observed | None = None) -> tuple[Any, None]:
        """Draw from `initial`."""
        with Drawn(shape, self.common, self.plate_axes):
            return self.model.initial(self.context), None

    def transition(self, state: Any, shape: torch.Size, seen: Observed) -> tuple[Any, None]:
        """Draw from `transition`."""
        assert seen.action is not None
        with Drawn(shape, self.common, self.plate_axes):
            return self.model.transition(state, axes(seen.action, self.plate_axes), self.context), None


class Guided(Bootstrap):
    """A user's guide, weighted by how much likelier its draws are under the model."""

    def __init__(self, recursion: Recursion, common: bool, guide: Guide) -> None:
        super().__init__(recursion, common)
        self.guide = guide

    def initial(self, shape: torch.Size, seen: Observed | None = None) -> tuple[Any, Any]:
        """Draw from the guide's `initial`."""
        if seen is None:
            return super().initial(shape)
        return self._propose(shape, seen, "initial", ())

    def transition(self, state: Any, shape: torch.Size, seen: Observed) -> tuple[Any, Any]:
        """Draw from the guide's `transition`."""
        assert seen.action is not None
        return self._propose(shape, seen, "transition", (state, axes(seen.action, self.plate_axes)))

    def _propose(
        self, shape: torch.Size, seen: Observed, program: str, given: tuple[Any, ...]
    ) -> tuple[Any, Any]:
        observations = {site: _at_particles(value) for site, value in seen.observations.items()}
        observed = {site: _at_particles(flags) for site, flags in seen.observed.items()}
        with Drawn(shape, self.common, self.plate_axes) as proposed:
            getattr(self.guide, program)(*given, self.context, observations, observed)
        values = {name: value for name, (_, value) in proposed.sites.items()}
        with poutine.condition(data=values), Recorded() as target:
            state = getattr(self.model, program)(*given, self.context)
        if set(target.sites) != set(values):
            raise ModelError(
                type(self.guide).__name__,
                [f"{program}: its sites are {sorted(values)}, but the model's are {sorted(target.sites)}"],
            )
        log_ratio = torch.zeros((), device=self.context.device)
        for name, (q, value) in proposed.sites.items():
            p = unmasked(target.sites[name]["fn"])
            ratio = log_density(p, value) - log_density(q, value)
            log_ratio = log_ratio + (ratio.flatten(3).sum(-1) if ratio.dim() > 3 else ratio)
        return state, log_ratio.expand(shape)


class LookAhead(Bootstrap):
    """Noise drawn from its posterior given the coming observation, as far as linearisation tells.

    Every particle linearises `z = h(f(x, ε))` at ε = 0 for itself, and draws ε from the Gaussian posterior
    that follows. The log-ratio makes up for what the linearisation misses.

    Raises:
        UnsupportedModelError: If the programs cannot be read as Gaussian.
    """

    def __init__(self, recursion: Recursion, common: bool) -> None:
        super().__init__(recursion, common)
        self.signature = recursion.signature
        zero = some_action(self.model, (1, 1, 1, *[1] * recursion.plate_axes))
        with Reparameterised("initial", self.plate_axes):
            state = self.model.initial(self.context)
        state = self.signature.broadcast(state, torch.Size((self.model.num_contexts, 1, 1)))
        with Reparameterised("transition", self.plate_axes) as transition:
            state = self.model.transition(state, zero, self.context)
        with Reparameterised("observation", self.plate_axes) as observation:
            self.model.percept(state, zero, self.context)
        self.num_noise = transition.num_noise
        self.discrete = observation.discrete  # has no say in where to look
        sites = self.signature.observations
        self.num_values = sum(sites[name].shape.numel() for name in sites.keys() - self.discrete)

    def transition(self, state: Any, shape: torch.Size, seen: Observed) -> tuple[Any, Any]:
        """Draw the noise looking ahead, and move with it."""
        assert seen.action is not None
        if not self.num_noise or not self.num_values or (seen.rows is not None and not len(seen.rows)):
            return super().transition(state, shape, seen)
        mean, root = self._posterior(state, shape, seen)  # [C, B, N, E], [C, B, N, E, E]
        noise_shape = (1 if self.common else shape[0], *shape[1:], self.num_noise)
        xi = torch.randn(noise_shape, dtype=mean.dtype, device=mean.device)
        noise = mean + (root @ xi[..., None]).squeeze(-1)
        log_det = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        log_ratio = 0.5 * (xi.square() - noise.square()).sum(-1) + log_det
        with Reparameterised("transition", self.plate_axes, noise):
            moved = self.model.transition(state, axes(seen.action, self.plate_axes), self.context)
        return moved, log_ratio

    def _posterior(self, state: Any, shape: torch.Size, seen: Observed) -> tuple[Tensor, Tensor]:
        """Mean and root of the covariance of ε given what is seen, to first order."""
        predicted, H, R, values, observed = self._linearised(state, shape, seen)
        H = H * observed[..., None]  # [C, B, N, m, E]
        R = torch.where(observed[..., None] & observed[..., None, :], R, 0.0)
        R = R + torch.diag_embed((~observed).to(R.dtype))
        S_inverse_H, singular = torch.linalg.solve_ex(H @ H.mT + R, H)
        gain = S_inverse_H.mT  # K = Hᵀ S⁻¹, [C, B, N, E, m]
        innovation = torch.where(observed, values - predicted, 0.0)
        mean = (gain @ innovation[..., None]).squeeze(-1)
        one = torch.eye(self.num_noise, dtype=mean.dtype, device=mean.device)
        rest = one - gain @ H
        # Joseph's form stays positive however small the noise; the log-ratio corrects for the little added.
        root, indefinite = torch.linalg.cholesky_ex(rest @ rest.mT + gain @ R @ gain.mT + 1e-6 * one)
        failed = (singular != 0) | (indefinite != 0)
        if bool(failed.any()):
            c, b, _ = failed.expand(shape).nonzero()[0].tolist()
            raise DensityError(
                f"time {seen.time} of episode {seen.episode(b)} in context '{self.model.context_names[c]}': "
                'guide="ekf" cannot linearise what is observed there (is it free of noise, or not finite?)'
            )
        return mean, root

    def _linearised(self, state: Any, shape: torch.Size, seen: Observed) -> tuple[Tensor, ...]:
        """What is expected to be seen at ε = 0 `[C, B, N, m]`, its Jacobian, noise covariance; and what is.

        Every particle appears m times in a row, once for each value: the gradient of the sum of the k-th
        value at the k-th of them is the whole Jacobian, in one backward pass.
        """
        assert seen.action is not None
        C, B, N = shape
        m, E = self.num_values, self.num_noise
        batch, action = torch.Size((C, B, N * m)), axes(seen.action, self.plate_axes)
        repeated = map_state(lambda leaf: leaf.repeat_interleave(m, 2), state)
        first = next(leaf for _, leaf in leaves(state))
        with torch.enable_grad():
            noise = torch.zeros((*batch, E), dtype=first.dtype, device=first.device, requires_grad=True)
            with Reparameterised("transition", self.plate_axes, noise):
                moved = self.model.transition(repeated, action, self.context)
            with _LookedAt(seen, self.signature, batch, self.discrete) as sensed:
                self.model.percept(self.signature.broadcast(moved, batch), action, self.context)
            mean = torch.cat(sensed.means, -1).reshape(C, B, N, m, m)
            jacobian = None
            if mean.requires_grad:
                total = mean.diagonal(dim1=3, dim2=4).sum()
                (jacobian,) = torch.autograd.grad(total, noise, allow_unused=True)
        if jacobian is None:  # nothing seen depends on the noise
            jacobian = torch.zeros_like(noise)
        covariance = block_diagonal(sensed.covariances).detach()
        return (
            mean.detach()[..., 0, :],
            jacobian.reshape(C, B, N, m, E),
            covariance.reshape(C, B, N, m, m, m)[:, :, :, 0],
            torch.cat(sensed.values, -1)[None, :, None],
            torch.cat(sensed.observed, -1)[None, :, None],
        )


class _LookedAt(Sensed):
    """What a proposal rests on. Whether it can have been seen shows where particles are weighted.

    What depends on a hidden site is passed over: taken for surer than it is, it would make proposals narrow,
    and their weights wild.
    """

    def _pyro_sample(self, msg: Any) -> None:
        before = len(self.observed)
        super()._pyro_sample(msg)
        parents = self.signature.dependencies.parents.get(msg["name"], frozenset())
        if len(self.observed) > before and not self.hidden.isdisjoint(parents):
            self.observed[-1] = torch.zeros_like(self.observed[-1])

    def possible(self, name: str, mask: Tensor | bool, observed: Tensor | None) -> None:
        """Everywhere."""


def _at_particles(tensor: Tensor) -> Tensor:
    """`[B, …]` as `[1, B, 1, …]`."""
    return tensor.reshape(1, tensor.shape[0], 1, *tensor.shape[1:])
