"""The smallest capacity that a run survives on a GPU, by trying. Needs no torch."""

from collections.abc import Callable

from brimful.core.measurement import Survival

LOWEST, HIGHEST = 0.9, 1.05
RESOLUTION = 0.01


def bisect(survives: Callable[[int], bool], forecast: int) -> Survival:
    """Halve what lies between 0.9 and 1.05 of the forecast until one percent of it is left."""
    dies_at, survives_at = int(forecast * LOWEST), int(forecast * HIGHEST)
    if not survives(survives_at):
        return Survival(None, survives_at, 1)
    if survives(dies_at):
        return Survival(dies_at, None, 2)
    num_probes = 2
    while survives_at - dies_at > RESOLUTION * forecast:
        middle = (survives_at + dies_at) // 2
        num_probes += 1
        if survives(middle):
            survives_at = middle
        else:
            dies_at = middle
    return Survival(survives_at, dies_at, num_probes)
