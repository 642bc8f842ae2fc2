"""`cpomdp cache`: compiled kernels that are kept for the next time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpomdp_ppl.cli.command import OK, Command
from cpomdp_ppl.cli.options import many
from cpomdp_ppl.native.cache import cache_folder, cache_size, clear_cache

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def cache(options: Namespace) -> int:
    """Say where compiled kernels are kept and what they take, or remove them."""
    folder = cache_folder()
    count, size = clear_cache() if options.clear else cache_size()
    print(f"{folder}: {'removed ' if options.clear else ''}{many(count, 'kernel')}, {size / 1e6:.1f} MB")
    return OK


def _options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--clear", action="store_true", help="remove them; they are compiled anew when needed"
    )


CACHE = Command(
    "Show or clear the compiled kernels that are kept for the next time (in $CPOMDP_CACHE, if set).",
    ("cpomdp cache", "cpomdp cache --clear"),
    _options,
    cache,
)
