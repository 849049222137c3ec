import pytest

from brimful.core.errors import UnknownName
from brimful.core.nearest import nearest

NAMES = ("a10g", "a100-40gb", "rtx-5090", "rtx-4090", "h100-80gb", "mistralai/Mistral-7B-v0.3", "flan-t5-xl")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("A10G", "a10g"),
        ("RTX 5090", "rtx-5090"),
        ("rtx_5090", "rtx-5090"),
        ("h100", "h100-80gb"),
        ("mistral-7b-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("Mistral7B", "mistralai/Mistral-7B-v0.3"),
        ("google/flan-t5-xll", "flan-t5-xl"),
    ],
)
def test_the_name_that_was_meant_comes_first(typed: str, meant: str) -> None:
    assert nearest(typed, NAMES)[0] == meant


@pytest.mark.parametrize("typed", ["", "zzzzzz", "/"])
def test_nothing_is_offered_for_a_name_like_none(typed: str) -> None:
    assert nearest(typed, NAMES) == ()


def test_at_most_n_are_offered() -> None:
    assert len(nearest("rtx", NAMES, n=1)) == 1


def test_an_unknown_name_says_what_it_could_have_been_and_what_else_to_do() -> None:
    error = UnknownName("GPU", "rtx 5091", NAMES, hint="`brimful gpus` lists them")
    assert error.message == "unknown GPU 'rtx 5091'"
    assert error.hint is not None
    assert error.hint.startswith("did you mean rtx-5090")
    assert error.hint.endswith("lists them")
