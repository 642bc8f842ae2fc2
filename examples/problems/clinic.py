"""A clinic: which of two drugs helps this patient, if any? Counts are seen, and one thing cannot be undone.

cpomdp check examples/problems/clinic.py:Clinic
"""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from cpomdp_ppl import CPOMDP, History

TEST, TREAT_A, TREAT_B, WAIT = range(4)


class Clinic(CPOMDP):
    """A patient comes once a week, and drug A helps some patients, drug B others, and a third kind neither.

    The state is how severe the illness is, and whether the patient has become allergic, which any dose may
    bring about and which makes every further dose harmful. Each week the patient tells how many of seven
    nights were bad, and after a dose whether there is a rash; a test counts cells in the blood, which says
    much more, but costs.
    """

    contexts = ("A helps", "B helps", "neither helps")
    actions = ("test", "treat A", "treat B", "wait")
    context_prior = (0.4, 0.4, 0.2)
    horizon = 12

    def initial(self, context: Tensor) -> dict[str, Tensor]:
        """Rather ill, and not allergic."""
        severity = pyro.sample("severity", dist.Normal(2.0, 0.5))
        return {"severity": severity, "allergic": torch.zeros_like(severity).long()}

    def transition(self, state: dict[str, Tensor], action: Tensor, context: Tensor) -> dict[str, Tensor]:
        """Untreated, the illness tends to a severity of 2; with the right drug, to −1."""
        treated = (action == TREAT_A) | (action == TREAT_B)
        helped = action == context + TREAT_A  # context 2 would be helped by waiting, which is no drug
        level = torch.where(helped & treated, -1.0, 2.0)
        severity = pyro.sample("severity", dist.Normal(level + 0.7 * (state["severity"] - level), 0.3))
        became = pyro.sample("becomes_allergic", dist.Bernoulli(torch.where(treated, 0.03, 0.0)))
        return {"severity": severity, "allergic": torch.maximum(state["allergic"], became.long())}

    def observation(self, state: dict[str, Tensor], action: Tensor, context: Tensor) -> None:
        """Bad nights every week; a rash, perhaps, after a dose; cells, where they were counted."""
        treated = (action == TREAT_A) | (action == TREAT_B)
        pyro.sample("bad_nights", dist.Binomial(7, logits=state["severity"] - 1.0))
        pyro.sample("rash", dist.Bernoulli(torch.where(state["allergic"] == 1, 0.8, 0.05)).mask(treated))
        pyro.sample("cells", dist.Poisson(10 * state["severity"].exp()).mask(action == TEST))

    def reward(self, state: dict[str, Tensor], action: Tensor, context: Tensor) -> Tensor:
        """Illness costs, the more the worse it is; so do tests and drugs, and drugs for the allergic most."""
        treated = (action == TREAT_A) | (action == TREAT_B)
        drug = torch.where(state["allergic"] == 1, 1.5, 0.2) * treated
        return -torch.nn.functional.softplus(state["severity"]) - 0.3 * (action == TEST) - drug


def rule(history: History) -> Tensor:
    """Three weeks of A; if the nights are still bad, B; if those do not help either, or two rashes, wait."""
    nights, time = history.observations["bad_nights"], history.time  # [B, t + 1]
    if time < 3:
        return torch.full((history.num_episodes,), TREAT_A)
    drug = torch.where(nights[:, 2:4].mean(1) < 3.5, TREAT_A, TREAT_B)
    in_vain = nights[:, -3:].mean(1) > 3.5 if time >= 7 else torch.zeros_like(drug).bool()
    rashes = history.observations["rash"].sum(1)  # zero where there was no dose
    return torch.where(in_vain | (rashes >= 2), WAIT, drug)
