"""Running things, many at once if need be, and keeping what came out of them."""
