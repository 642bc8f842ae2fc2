"""The C text that every kernel begins with: types, elementary functions, random numbers and samplers."""

from functools import cache
from importlib.resources import files

PARTS = ("types.h", "maths.h", "random.h", "samplers.h")
"""Files beside this one, in the order in which they build on each other."""


@cache
def prelude() -> str:
    """What a kernel may use; a complete C text when functions that use it follow."""
    return "\n".join(map(c_text, PARTS))


def program_declarations() -> str:
    """How the library of a model's programs hands them over; to follow the prelude."""
    return c_text("programs.h")


def c_text(name: str, package: str = "cpomdp_ppl.native") -> str:
    """A C text that comes with a package."""
    return files(package).joinpath(name).read_text(encoding="utf-8")
