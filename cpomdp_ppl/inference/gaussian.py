"""Programs read as Gaussian: every site is `loc + scale·ε`, so what a program returns is a function of ε."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from cpomdp_ppl.errors import UnsupportedModelError
from cpomdp_ppl.handlers import base_of, is_deterministic, mask_of
from cpomdp_ppl.inference.density import is_discrete, unmasked
from cpomdp_ppl.inference.enumeration import ENGINE_AXES
from cpomdp_ppl.inference.gaussian_belief import block_diagonal
from cpomdp_ppl.inference.observed import Observed, Scored, hidden_parents
from cpomdp_ppl.inference.site_parameters import require_parameters
from cpomdp_ppl.native.recording import is_traced

if TYPE_CHECKING:
    from collections.abc import Collection

    from cpomdp_ppl.signature import Signature


@dataclass(frozen=True)
class GaussianSite:
    """A sample site as `loc + scale·ε`.

    Attributes:
        loc: `[…, *event]`.
        scale: Standard deviations, of the shape of `loc`; or a lower triangular matrix `[…, d, d]`; None if
            there is no noise.
        triangular: Whether it is the matrix.
    """

    loc: Tensor
    scale: Tensor | None
    triangular: bool = False

    def at(self, noise: Tensor) -> Tensor:
        """The value of the site for standard noise ε of the shape of `loc`."""
        if self.scale is None:
            return self.loc
        if self.triangular:
            return self.loc + (self.scale @ noise[..., None])[..., 0]
        return self.loc + self.scale * noise


def gaussian_site(program: str, site: Any, plate_axes: int) -> GaussianSite:
    """Read a site's distribution as Gaussian.

    Raises:
        UnsupportedModelError: If it is not, or if the program itself fixes the value of a random site.
        DensityError: If its scale is negative or not a number at the first particle: other sigma points may
            be where states never are. A program that is being traced has no values to look at.
    """
    outer = fn = unmasked(site["fn"])
    while isinstance(fn, torch.distributions.Independent):
        fn = fn.base_dist
    if isinstance(fn, dist.Delta):
        if program == "observation" and bool((fn.log_density != 0).any()):
            raise UnsupportedModelError(
                f"{program}: site '{site['name']}' has a density of its own (log_density=…), which a Kalman "
                "filter would leave out"
            )
        return GaussianSite(fn.v, None)
    if site["is_observed"]:
        raise UnsupportedModelError(
            f"{program}: site '{site['name']}' is given its value by the program (obs=…), "
            "which a Kalman filter cannot condition on"
        )
    if isinstance(fn, torch.distributions.Normal):
        if not is_traced() and not float(fn.scale.detach().min()) >= 0:  # NaN, if any is
            require_parameters(program, site["name"], outer, _central(site, plate_axes))
        return GaussianSite(fn.loc, fn.scale)
    if isinstance(fn, torch.distributions.MultivariateNormal):
        if not is_traced() and bool(fn._unbroadcasted_scale_tril.isnan().any()):
            require_parameters(program, site["name"], outer, _central(site, plate_axes))
        return GaussianSite(fn.loc, fn._unbroadcasted_scale_tril, triangular=True)
    raise UnsupportedModelError(
        f"{program}: site '{site['name']}' is {type(fn).__name__}, but Kalman filters need every site to be "
        "Normal, MultivariateNormal or Delta, or, among observations, discrete"
    )


def is_discrete_site(site: Any) -> bool:
    """Whether a site has single values of positive probability, and is not merely without noise."""
    fn = base_of(site["fn"])
    return not isinstance(fn, dist.Delta) and is_discrete(fn)


def _central(site: Any, plate_axes: int) -> Tensor:
    """Where a site counts, at the first particle alone."""
    shape = site["fn"].batch_shape
    axis = len(shape) - plate_axes - 1
    first = torch.arange(shape[axis]) == 0 if axis >= 0 else torch.tensor(True)
    return first.reshape(-1, *[1] * plate_axes) & mask_of(site)


class Reparameterised(Messenger):
    """Sets every site of a program to `loc + scale·ε`.

    The noise ε of all sites is `[C, B, K, E]`, in the order of visits; None for ε = 0, to find out its size.

    Attributes:
        num_noise: Dimension E of the noise used so far.
        discrete: Names of the discrete sites of an `observation` program, which are drawn.
    """

    def __init__(self, program: str, plate_axes: int, noise: Tensor | None = None) -> None:
        super().__init__()
        self.program = program
        self.plate_axes = plate_axes
        self.noise = noise
        self.num_noise = 0
        self.discrete: list[str] = []

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg) or is_deterministic(msg):
            return
        if self.program == "observation" and is_discrete_site(msg):
            self.discrete.append(msg["name"])
            return
        site = gaussian_site(self.program, msg, self.plate_axes)
        if site.scale is None:
            msg["value"] = site.loc
            return
        fn = msg["fn"]
        # What is right of the engine's axes, whether or not the distribution has those.
        batch = (1,) * (ENGINE_AXES + self.plate_axes - len(fn.batch_shape)) + tuple(fn.batch_shape)
        shape = batch[ENGINE_AXES:] + tuple(fn.event_shape)
        start, self.num_noise = self.num_noise, self.num_noise + torch.Size(shape).numel()
        if self.noise is None:
            msg["value"] = site.loc.expand(batch[:ENGINE_AXES] + shape)
        else:
            noise = self.noise
            if self.num_noise - start < noise.shape[-1]:
                noise = noise[..., start : self.num_noise]
            msg["value"] = site.at(noise.reshape(noise.shape[:-1] + shape))


class Sensed(Scored):
    """Gives every observation site what was seen there, and keeps mean and covariance of the Gaussian ones.

    A site thus depends on the *values* of those before it, as its density does, and noise is independent
    between sites. A Gaussian site that was not seen, but on which others depend, is a function of its noise,
    ε `[C, B, K, E]` in the order of visits. Sites that are `discrete` are passed over.

    Attributes:
        means: Means by site, `[C, B, K, m]` with plates and event flattened.
        covariances: Covariances of the noise by site, `[C, B, K, m, m]`.
        values: What was seen by site, `[B, m]`.
        observed: Whether it was seen, by site, bool `[B, m]`.
    """

    def __init__(
        self,
        seen: Observed,
        signature: Signature,
        batch_shape: torch.Size,
        discrete: Collection[str] = (),
        noise: Tensor | None = None,
    ) -> None:
        super().__init__(seen, signature)
        self.batch_shape = batch_shape
        self.discrete = discrete
        self.noise = noise
        self.num_noise = 0
        self.hidden = hidden_parents(signature, seen, signature.observations.keys() - discrete)
        self.means: list[Tensor] = []
        self.covariances: list[Tensor] = []
        self.values: list[Tensor] = []
        self.observed: list[Tensor] = []

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg) or is_deterministic(msg):
            return
        name = msg["name"]
        spec, value, flags = (
            self.signature.observations[name],
            self.seen.observations[name],  # [B, *plates, *event]
            self.seen.observed[name],  # [B, *plates]
        )
        B, shape, size, full = len(value), spec.shape, spec.shape.numel(), self.batch_shape + spec.shape
        everything = self.seen.everything
        at_cells = None if everything else flags.reshape(1, B, 1, *spec.plates)
        msg["value"] = at_sites = value.reshape(1, B, 1, *shape)
        if name in self.discrete:  # whether that can have been seen is looked at where it is scored
            return

        self.possible(name, mask_of(msg), at_cells)
        site = gaussian_site("observation", msg, len(spec.plates))
        mean = site.loc if site.loc.shape == full else site.loc.expand(full)
        self.means.append(mean.reshape(*self.batch_shape, size))
        self.covariances.append(self._covariance(site, shape))

        self.values.append(value.reshape(B, size))
        event = (1,) * (len(shape) - len(spec.plates))
        flags = flags.reshape(B, *spec.plates, *event).expand(B, *shape)
        self.observed.append(flags.reshape(B, size))
        if not everything:
            hidden = mean
            if name in self.hidden and self.noise is not None:
                start, self.num_noise = self.num_noise, self.num_noise + size
                hidden = site.at(self.noise[..., start : self.num_noise].reshape(full))
            msg["value"] = torch.where(flags.reshape(at_sites.shape), at_sites, hidden)

    def scale_of(self, site: GaussianSite) -> Tensor | None:
        """The scale of a site's noise, without its graph, as a filter does not differentiate it."""
        return None if site.scale is None else site.scale.detach()

    def _covariance(self, site: GaussianSite, shape: torch.Size) -> Tensor:
        """The covariance of the site's noise, `[C, B, K, m, m]`."""
        batch, size = self.batch_shape, shape.numel()
        scale = self.scale_of(site)
        if scale is None:
            return site.loc.new_zeros(()).expand(*batch, size, size)
        if not site.triangular:
            variance = scale.square().expand(batch + shape).reshape(*batch, size)
            return variance[..., None] if size == 1 else torch.diag_embed(variance)
        covariance = (scale @ scale.mT).expand(*batch, *shape, shape[-1])
        return block_diagonal(list(covariance.reshape(*batch, -1, shape[-1], shape[-1]).unbind(len(batch))))
