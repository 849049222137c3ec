"""A run's GPU memory without a GPU: trace the real step with fake tensors, replay its tape through an allocator.

`forecast(run)` is the way in. May import `step`, `catalog` and `core`. `allocator` and `budget` need no torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from brimful.core.forecast import Forecast
    from brimful.core.runfile import RunFile
    from brimful.core.tape import Tape


def forecast(run: "RunFile") -> "tuple[Forecast, Tape]":
    """What the run will need and whether it fits its card, with the tape that says so."""
    from brimful.forecast.summary import forecast_run

    return forecast_run(run)


__all__ = ["forecast"]
