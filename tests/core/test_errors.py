from pathlib import Path

import pytest

from brimful.core import errors
from brimful.core.errors import EXIT_CODES, BrimfulError, ExitCode, MissingPackage


def subclasses(kind: type[BrimfulError]) -> list[type[BrimfulError]]:
    return [kind, *(deeper for inner in kind.__subclasses__() for deeper in subclasses(inner))]


def test_every_exit_code_has_a_meaning() -> None:
    assert set(EXIT_CODES) == set(ExitCode)


@pytest.mark.parametrize("kind", subclasses(BrimfulError), ids=lambda kind: kind.__name__)
def test_every_error_has_a_code_from_the_table_and_is_drawn_in_the_tree(kind: type[BrimfulError]) -> None:
    assert kind.exit_code in EXIT_CODES
    assert kind.__name__ in (errors.__doc__ or "")


def test_a_missing_package_prints_its_install_line() -> None:
    error = MissingPackage("bitsandbytes", "measuring qlora", extra="cuda")
    assert error.hint == "pip install 'brimful[cuda]'"
    assert error.exit_code == 7


def test_the_documentation_lists_every_exit_code_with_its_meaning() -> None:
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text("utf-8")
    for code, meaning in EXIT_CODES.items():
        assert f"| {int(code)} | {meaning} |" in page
