"""Series over time: what `torch.stack` makes of the same terms."""

from __future__ import annotations

import pytest
import torch

from cpomdp_ppl.inference.scan import TimeBuffer


def written(terms):
    series = TimeBuffer(len(terms))
    for t, term in enumerate(terms):
        series[t] = term
    return series.by_episode()


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float32),
        (torch.bool, torch.int64, torch.float32),
    ],
)
def test_a_series_is_its_terms_in_a_stack(dtypes):
    terms = [torch.arange(6).reshape(2, 3).add(t).to(dtype) / 7 for t, dtype in enumerate(dtypes)]
    terms = [term.to(dtype) for term, dtype in zip(terms, dtypes, strict=True)]
    expected = torch.stack(terms).movedim(2, 0)  # [B, T, C]
    found = written(terms)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    nested = written([{"x": term, "y": {"z": -term.double()}} for term in terms])
    assert torch.equal(nested["x"], expected)
    assert torch.equal(nested["y"]["z"], -torch.stack([term.double() for term in terms]).movedim(2, 0))


@pytest.mark.parametrize("shape", [(2, 1), (1, 3), (3,), (2, 3, 1)])
def test_terms_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"at step 1, but \[2, 3\] at the first"):
        written([torch.ones(2, 3), torch.ones(shape)])


def test_what_is_not_known_stays_so():
    assert written([None, None]) is None
