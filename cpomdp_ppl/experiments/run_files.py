"""What files of a run folder are called, for those who write them and those who read them."""

SOLUTION = "solution"  # a folder with what a fit came to
SOLUTION_CONTENT = "solution.json"  # a file in it with all but the weights
CHECKPOINT = "checkpoint"  # a folder of a fit at work, with the best so far, whatever ended it
EVALUATION = "evaluation.json"  # what a policy earns and finds out
COMPARISON = "comparison.csv"  # policies side by side
HISTORY = "history.csv"  # what a fit measured, by iteration
RHAT = "rhat.csv"  # ArviZ's summary of contexts and states, a row for each
CALIBRATION = "calibration.json"  # whether the truth looks like a draw from the posteriors
ALGORITHM1 = "algorithm_1"  # episodes in the same context: `.csv`, `.nc` and a figure of this name

GOOD_RHAT = 1.01
"""Chains whose R-hat is above disagree (Vehtari et al., 2021): the filter has too few particles."""
