"""What can be named on the command line, and where it is: tables, which other packages add to.

The tables are data: this package imports neither solvers nor baselines, until a user names one of theirs.
Other packages add to a table by an entry point of the group that has its name.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from cpomdp_ppl.cli.errors import OURS, CommandError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Table:
    """Things by name.

    Attributes:
        group: Of entry points.
        kind: What the things are, for messages.
        own: Those that come with this distribution, as `module:object`.
    """

    group: str
    kind: str
    own: Mapping[str, str] = field(repr=False)

    def places(self) -> dict[str, str]:
        """Where everything is, by name. What comes with this distribution cannot be replaced."""
        return {**{each.name: each.value for each in entry_points(group=self.group)}, **self.own}

    def find(self, name: str) -> Any:
        """Import one of them.

        Raises:
            CommandError: If there is none of this name, or its package is not there or broken.
        """
        places = self.places()
        if name not in places:
            raise CommandError(f"there is no {self.kind} '{name}'; there are {', '.join(places)}")
        try:
            return EntryPoint(name, places[name], self.group).load()
        except (ImportError, AttributeError) as error:
            if name in self.own and not is_absence(error):
                raise  # a fault of ours, and nothing that the user can put right
            module = places[name].partition(":")[0]
            raise CommandError(
                f"the {self.kind} '{name}' is not to be had: {module} cannot be imported ({error})"
            ) from error


def is_absence(error: Exception) -> bool:
    """Whether an error says that a package of others is not installed."""
    named = error.name if isinstance(error, ModuleNotFoundError) else None
    return named is not None and named.partition(".")[0] not in OURS


COMMANDS = Table(
    "cpomdp_ppl.commands",
    "command",
    {
        "check": "cpomdp_ppl.cli.check:CHECK",
        "simulate": "cpomdp_ppl.cli.simulate:SIMULATE",
        "fit": "solvers.commands:FIT",
        "evaluate": "cpomdp_ppl.cli.evaluate:EVALUATE",
        "compare": "cpomdp_ppl.cli.compare:COMPARE",
        "run": "solvers.commands:RUN",
        "diagnose": "cpomdp_ppl.cli.diagnose:DIAGNOSE",
        "report": "cpomdp_ppl.cli.report:REPORT",
    },
)
"""Each a `Command`."""

POLICIES = Table(
    "cpomdp_ppl.policies",
    "policy",
    {
        "random": "cpomdp_ppl.cli.policies:RANDOM",
        "likeliest": "baselines.policies:LIKELIEST",
        "thompson": "baselines.policies:THOMPSON",
        "qmdp": "baselines.policies:QMDP",
        "pft": "baselines.policies:PFT",
        "ipft": "baselines.policies:IPFT",
        "pouct": "baselines.policies:POUCT",
        "pomcp": "baselines.policies:POMCP",
        "rdpg": "baselines.policies:RDPG",
        "recurrent_ppo": "baselines.policies:RECURRENT_PPO",
        "cids": "solvers.commands:CIDS",
    },
)
"""Each a `Recipe`."""

SOLVERS = Table("cpomdp_ppl.solvers", "solver", {"cids": "solvers.cids:load"})
"""Each a function `(directory, model) -> solution`, which has a `policy` and a `prior`."""


def is_installed(module: str) -> bool:
    """Whether a module can be imported; one that is there and broken is not."""
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True
