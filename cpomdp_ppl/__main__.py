"""`python -m cpomdp_ppl`, the same as `cpomdp`."""

from cpomdp_command import entry

if __name__ == "__main__":
    entry()
