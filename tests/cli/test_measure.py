import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import brimful

SRC = Path(brimful.__file__).parents[1]


def measure(*words: str) -> subprocess.CompletedProcess[str]:
    # no GPU for these, not even where there is one
    env = {**os.environ, "PYTHONPATH": str(SRC), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "brimful.cli.main", "measure", *words]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "a model or a --matrix"),
        (["gpt2", "--matrix", "rows.yaml", "--out", "x.json"], "a model or a --matrix"),
        (["--matrix", "rows.yaml"], "--out"),
        (["--matrix", "no-such-rows.yaml", "--out", "x.json"], "no-such-rows.yaml"),
        (["gpt2", "--cap", "plenty"], "21.5GiB"),
        (["gpt2", "--gpu", "a10x"], "a10g"),
        (["gpt2", "--set", "lora.rnk=3"], "lora.rank"),
        (["gpt2", "--workers", "0"], "workers"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_to_do(words: list[str], says: str) -> None:
    done = measure(*words)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("more", [[], ["--bisect", "--json"]])
def test_without_a_gpu_it_exits_with_7_and_one_line(more: list[str]) -> None:
    done = measure("gpt2", *more)
    assert done.returncode == 7
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0] == "error: measure needs a CUDA GPU, which is not here"
    assert lines[1].startswith("hint:")
    assert len(lines) == 2


def test_a_matrix_without_a_gpu_exits_with_7_and_writes_nothing(tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.yaml", tmp_path / "measured.json"
    rows.write_text("a: {model: gpt2}\n")
    assert measure("--matrix", str(rows), "--out", str(out)).returncode == 7
    assert not out.exists()


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is here")
@pytest.mark.parametrize("words", [["--method", "qlora"], ["--optimizer", "adamw-8bit"]])
def test_without_bitsandbytes_its_install_line_comes_before_anything_else(words: list[str]) -> None:
    done = measure("no-such-model", *words)
    assert done.returncode == 7
    assert "needs bitsandbytes" in done.stderr
    assert "pip install 'brimful[cuda]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_needs_no_torch() -> None:
    check = (
        "import sys\nfrom brimful.cli.main import main\n"
        "try:\n    main(['measure', '--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'transformers', 'peft', 'numpy'} & set(sys.modules)))"
    )
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, env=env)
    assert done.stdout.strip().endswith("[]"), done.stderr
    assert "--bisect" in done.stdout
