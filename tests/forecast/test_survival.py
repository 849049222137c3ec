import pytest

from brimful.core.units import GiB
from brimful.forecast.survival import bisect


@pytest.mark.parametrize("share", [0.91, 0.96, 0.999, 1.0, 1.03])
def test_bisection_ends_within_one_percent_around_the_true_capacity(share: float) -> None:
    true = int(20 * GiB * share)
    found = bisect(lambda capacity: capacity >= true, 20 * GiB)
    assert found.survives_at is not None
    assert found.dies_at is not None
    assert found.dies_at < true <= found.survives_at
    assert found.survives_at - found.dies_at <= 0.01 * 20 * GiB
    assert found.num_probes <= 6


def test_a_run_that_dies_even_above_the_forecast_has_no_capacity() -> None:
    found = bisect(lambda _: False, 10 * GiB)
    assert (found.survives_at, found.num_probes) == (None, 1)
    assert found.dies_at == int(10.5 * GiB)


def test_a_run_that_survives_far_below_the_forecast_never_dies() -> None:
    found = bisect(lambda _: True, 10 * GiB)
    assert (found.survives_at, found.dies_at) == (9 * GiB, None)
