"""Section 4 of the paper and its appendix, done again: the table, the figures, and where they differ.

python -m examples.paper --quick     # some minutes, in runs/paper/quick
python -m examples.paper             # most of an hour on two cores, in runs/paper/full

Needs the extras `plot`, `pomcp` and `parallel`. Work is divided into tasks, each with its own run folder;
a run that was stopped, or killed, goes on from there, and comes to the same table. Other code begins anew, in
other folders; what the old code left stays there until it is deleted with `--clean`.
"""
