"""Rotary frequencies that some models choose by length belong to the run, not to a micro-batch."""

from typing import Any

import pytest
import torch

LONGROPE = {
    "original_max_position_embeddings": 8,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 2.5, 3.0, 3.5],
        "original_max_position_embeddings": 8,
        "factor": 8.0,
    },
}


def frequencies(step) -> torch.Tensor:  # type: ignore[no-untyped-def]
    return next(part.inv_freq for part in step.model.module.modules() if hasattr(part, "original_inv_freq"))


@pytest.mark.parametrize("pin", [{}, {"layout": "unpadded"}])
def test_a_rows_result_does_not_depend_on_the_length_of_the_rows_beside_it(bench, pin: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    # rows of 9 and 13 tokens are beyond the 8 that were trained on, those of 1, 4 and 6 are not
    model = bench.folder("phi3", **LONGROPE)
    losses = []
    for slices in ((5,), (1, 1, 1, 1, 1)):
        step = bench.step(model, pin)
        losses.append(step.run(bench.batches(step, slices, **pin)))
    torch.testing.assert_close(*losses, rtol=1e-9, atol=0)


def test_the_longest_row_that_the_run_allows_chooses_the_frequencies(bench) -> None:  # type: ignore[no-untyped-def]
    model = bench.folder("phi3", **LONGROPE)
    short, long = (frequencies(bench.step(model, data={"max_length": length})) for length in (8, 16))
    factors = (torch.tensor(LONGROPE["rope_parameters"][name]) for name in ("long_factor", "short_factor"))
    torch.testing.assert_close(short / long, torch.div(*factors), rtol=1e-6, atol=0, check_dtype=False)
