"""What files of a run folder are called, for those who write them and those who read them."""

SOLUTION = "solution"
"""What a fit came to: a folder."""

CHECKPOINT = "checkpoint"
"""Of a fit at work: a folder with the best so far, whatever ended it."""

EVALUATION = "evaluation.json"
"""What a policy earns and finds out."""

COMPARISON = "comparison.csv"
"""Policies side by side."""

HISTORY = "history.csv"
"""What a fit measured, by iteration."""

RHAT = "rhat.csv"
"""ArviZ's summary of contexts and states, a row for each."""

CALIBRATION = "calibration.json"
"""Whether the truth looks like a draw from the posteriors."""

ALGORITHM1 = "algorithm_1"
"""Episode after episode in the same context: `.csv`, `.nc` and a figure of this name."""

GOOD_RHAT = 1.01
"""Chains whose R-hat is above disagree (Vehtari et al., 2021): the filter has too few particles."""
