"""What a mistyped name probably meant."""

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

_CUTOFF = 0.6


def nearest(name: str, candidates: Iterable[str], n: int = 3) -> tuple[str, ...]:
    """The at most `n` candidates most like `name`, best first; empty when none is alike.

    Case, dots, dashes, underscores, spaces and slashes do not count: people write `RTX 5090` for `rtx-5090` and
    leave out the organisation before a model's name.
    """
    scored = [(_likeness(name, candidate), candidate) for candidate in dict.fromkeys(candidates)]
    scored.sort(key=lambda pair: (-pair[0], pair[1]))
    return tuple(candidate for score, candidate in scored[:n] if score >= _CUTOFF)


def _likeness(name: str, candidate: str) -> float:
    wanted, whole = _normalised(name), _normalised(candidate)
    if not wanted or not whole:
        return 0.0
    if wanted == whole:
        return 1.0
    own, last = _normalised(name.rsplit("/", 1)[-1]), _normalised(candidate.rsplit("/", 1)[-1])
    score = max(SequenceMatcher(None, a, b).ratio() for a, b in ((wanted, whole), (own, last)))
    # a beginning or a part of a name is a better clue than its share of the letters says
    if len(own) >= 3 and own in whole:
        score = max(score, 0.8 + 0.19 * len(own) / len(whole))
    return score


def _normalised(name: str) -> str:
    return re.sub(r"[\s._/\-]+", "", name.casefold())
