import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

from brimful.cli.flags import KEYS as FLAGS
from brimful.cli.flags import build_run, parse_settings
from brimful.cli.forecast import forecast
from brimful.cli.measure import measure
from brimful.core.runfile import KEYS, RunFile
from brimful.core.units import Batch


@pytest.mark.parametrize("command", [forecast, measure])
def test_every_flag_that_mirrors_a_key_exists_and_so_does_its_key(command: Callable[..., None]) -> None:
    assert set(FLAGS.values()) <= {key.name for key in KEYS}
    assert {"target", "settings", "as_json", *FLAGS} <= set(inspect.signature(command).parameters)


def test_a_bare_model_is_a_run_file_of_defaults() -> None:
    assert build_run("org/model", {}, ()) == RunFile("org/model")


def test_settings_win_over_flags_and_flags_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: gpt2\nbatch: 8\nmethod: lora\nlora: {rank: 4}\n")
    run = build_run(str(path), {"batch": "16", "lora.rank": 8}, ["lora.rank=32", "optimizer.betas=[0.8, 0.9]"])
    assert run.method == "lora"
    assert run.batch == Batch(sequences=16)
    assert run.lora.rank == 32
    assert run.optimizer.betas == (0.8, 0.9)


def test_settings_are_read_as_yaml() -> None:
    assert parse_settings(["a.b=1", "c=x=y", "d=[1, 2]"]) == {"a.b": 1, "c": "x=y", "d": [1, 2]}
