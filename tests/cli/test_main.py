import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import brimful
from brimful.core.errors import EXIT_CODES

SRC = Path(brimful.__file__).parents[1]


def brimful_command(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "brimful.cli.main", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SRC), **env},
        timeout=60,
    )


@pytest.mark.parametrize("code", ["import brimful", "import brimful.cli.main", "from brimful import Forecast, RunFile"])
def test_importing_needs_neither_torch_nor_transformers(code: str) -> None:
    check = f"{code}\nimport sys\nprint(sorted({{'torch', 'transformers', 'peft', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(SRC)}
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_help_imports_neither_torch_nor_transformers() -> None:
    check = (
        "import sys\nfrom brimful.cli.main import main\n"
        "try:\n    main(['forecast', '--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'transformers', 'peft', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(SRC)}
    )
    assert done.stdout.strip().endswith("[]"), done.stderr


def test_help_takes_at_most_three_tenths_of_a_second() -> None:
    def once() -> float:
        started = time.perf_counter()
        assert brimful_command("--help").returncode == 0
        return time.perf_counter() - started

    # the best of several: other work on the machine is not what this measures
    assert min(once() for _ in range(5)) <= 0.3


def test_help_lists_every_exit_code() -> None:
    text = " ".join(brimful_command("--help").stdout.split())
    for code, meaning in EXIT_CODES.items():
        assert f"{code.value} {meaning}" in text


def test_version_is_the_packages() -> None:
    assert brimful_command("--version").stdout == f"brimful {brimful.__version__}\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["forecast", "no-such-file.yaml"], "no-such-file.yaml"),
        (["forecast", "gpt2", "--precision", "bf17"], "bf16"),
        (["forecast", "gpt2", "--set", "lora.rnk=3"], "lora.rank"),
        (["forecast", "gpt2", "--set", "lora.rank"], "--set"),
        (["forecast", "gpt2", "--set", "lora.rank=["], "YAML"),
        (["forecast", "gpt2", "--batch", "some"], "16 sequences"),
        (["forecast", "gpt2", "--recompute", "most"], "every-2nd"),
        (["forecast", "gpt2", "--no-such-flag"], "--no-such-flag"),
        (["forecast"], "MODEL"),
        (["forcast"], "forecast"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_to_do_without_a_traceback(words: list[str], says: str) -> None:
    done = brimful_command(*words)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("where", ["before", "after", "environment"])
def test_debug_shows_the_traceback_wherever_it_is_asked_for(where: str) -> None:
    words = ["forecast", "gpt2", "--precision", "bf17"]
    if where == "environment":
        done = brimful_command(*words, BRIMFUL_DEBUG="1")
    else:
        done = brimful_command(*(["--debug", *words] if where == "before" else [*words, "--debug"]))
    assert "Traceback" in done.stderr
    assert done.returncode == 2


def test_an_unforeseen_error_is_one_line_that_names_debug() -> None:
    check = (
        "from brimful.cli import main\n"
        "@main.app.command()\n"
        "def boom():\n    raise ValueError('first\\nsecond')\n"
        "main.main(['boom'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(SRC)}
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "error: ValueError: first"
    assert "--debug" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_public_names_are_sorted_and_there() -> None:
    assert brimful.__all__ == sorted(brimful.__all__)
    for name in brimful.__all__:
        assert getattr(brimful, name) is not None
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = brimful.nothing_like_it
