import sys
from pathlib import Path

import pytest

from brimful.core.errors import UsageError
from brimful.core.units import GiB
from brimful.forecast import fresh, matrix

TINY = {"model": "smollm2-135m", "batch": 1, "data": {"max_length": 32}}


def test_a_matrix_is_read_whole_or_in_part(tmp_path: Path) -> None:
    path = tmp_path / "rows.yaml"
    path.write_text("gpt2-full: {model: gpt2}\ngpt2-lora: {model: gpt2, method: lora}\nt5: {model: flan-t5-small}\n")
    assert list(matrix.read_matrix(path)) == ["gpt2-full", "gpt2-lora", "t5"]
    assert list(matrix.read_matrix(path, "lora,t5")) == ["gpt2-lora", "t5"]
    with pytest.raises(UsageError, match="no row"):
        matrix.read_matrix(path, "llama")


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: b\n", "a: {b\n", ""])
def test_a_file_that_is_no_matrix_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.yaml"
    path.write_text(text)
    with pytest.raises(UsageError):
        matrix.read_matrix(path)


def test_a_row_that_fails_does_not_stop_the_others() -> None:
    said: list[str] = []
    found = matrix.forecast_rows({"bad": {"model": "no-such-model"}, "good": TINY}, say=said.append)
    assert list(found) == ["bad", "good"]
    assert "no-such-model" in found["bad"]["error"]
    assert set(found["good"]) == {"allocated", "reserved", "smallest", "weights", "phases", "versions", "seconds"}
    assert found["good"]["allocated"] <= found["good"]["reserved"]
    assert len(said) == 2


def test_a_process_that_dies_is_an_error_and_not_the_end() -> None:
    assert "exit code 3" in fresh.call(sys.exit, 3)["error"]
    assert fresh.call(dict, [("a", 1)]) == {"a": 1}


def test_the_table_has_a_line_for_every_row_and_tells_errors() -> None:
    ours = {"a": {"allocated": 10 * GiB, "reserved": 11 * GiB, "phases": {"load": [GiB, GiB]}}, "b": {"error": "no"}}
    theirs = {
        "a": {"allocated": 8 * GiB, "reserved": 11 * GiB, "phases": {}, "died": None},
        "b": {"allocated": GiB, "reserved": GiB, "phases": {}, "died": None},
    }
    lines = list(matrix.compare(ours, theirs, phases=True))
    assert "+25.00%" in lines[1]
    assert "+0.00%" in lines[1]
    assert lines[2].split()[0] == "load"
    assert lines[3].startswith("b")
    assert "no" in lines[3]
