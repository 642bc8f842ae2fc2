"""Programs as scalar expressions, and C code that computes them."""
