"""Ready-made CPOMDPs."""

from cpomdp_ppl.models.beacons import Beacons
from cpomdp_ppl.models.contextual_tiger import ContextualTiger
from cpomdp_ppl.models.harbour import Harbour
from cpomdp_ppl.models.light_dark import LightDark
from cpomdp_ppl.models.line_grid import LineGrid
from cpomdp_ppl.models.office import Office

__all__ = ["Beacons", "ContextualTiger", "Harbour", "LightDark", "LineGrid", "Office"]
