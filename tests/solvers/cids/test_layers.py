from __future__ import annotations

import torch
from torch import nn

from solvers.cids.layers import log_softmax, lstm_step


def test_logarithms_of_probabilities_are_those_of_torch():
    logits = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[1, 2, 3] = -torch.inf  # ruled out
    torch.testing.assert_close(log_softmax(logits), logits.log_softmax(-1))


def test_a_step_of_an_lstm_is_that_of_torch():
    """Also far out, where gates are open or shut; and so are its gradients."""
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 4).double()
    inputs, hidden, cell = (10 * torch.randn(5, n, dtype=torch.float64) for n in (3, 4, 4))
    results = []
    for after in (
        lstm_step(lstm, inputs, hidden, cell),
        torch.lstm_cell(inputs, (hidden, cell), *lstm.all_weights[0]),
    ):
        gradient = torch.autograd.grad(torch.cat(after).sin().sum(), list(lstm.parameters()))
        results.append((*after, *gradient))
    torch.testing.assert_close(*results)
