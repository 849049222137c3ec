"""What is wrong with a request is said in one line, with what to do next, before memory is taken."""

import json
import socket
from pathlib import Path

import pytest

from brimful.core.errors import ExitCode, MissingPackage, ModelError, UnknownName, UsageError
from brimful.core.runfile import from_mapping
from brimful.forecast import forecast
from brimful.step.assemble import assemble, shape_model
from brimful.step.source import find_source
from brimful.step.target import Target

HOPPER = Target("cuda", (9, 0), traced=True)


def refused(kind: type[UsageError], call, *words: str) -> UsageError:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    whole = f"{error.message} {error.hint}"
    assert error.hint
    assert "\n" not in whole
    assert error.exit_code == ExitCode.USAGE
    for word in words:
        assert word in whole
    return error


def test_an_unknown_model_gets_the_nearest_names() -> None:
    refused(UnknownName, lambda: find_source("mistral-7b-v0.33"), "mistral-7b-v0.3")


def test_an_unreachable_hub_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(UnknownName, lambda: find_source("mistralai/Mistral-7B-v9"), "could not be reached", "did you mean")


def test_a_hub_that_refuses_connections_is_said_without_trying_again(monkeypatch: pytest.MonkeyPatch, caplog) -> None:  # type: ignore[no-untyped-def]
    with socket.socket() as closed:  # bound and not listening: connections are refused
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(UnknownName) as caught:
            find_source("nobody/nothing")
    assert "could not be reached" in str(caught.value.hint)
    assert "Retry" not in caplog.text


def test_a_path_that_is_neither_folder_nor_hub_id_is_not_blamed_on_the_hub() -> None:
    error = refused(UnknownName, lambda: find_source("./no/such/folder"), "no folder here")
    assert "reached" not in error.hint


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    refused(ModelError, lambda: find_source(str(tmp_path / "config.json")), "is a file", "folder")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ("has no config.json",)),
        ("not json", ("is not JSON",)),
        ("\x80", ("is not JSON",)),
        ("[1]", ("not a model configuration",)),
        ('{"hidden_size": 3}', ("no model_type",)),
        ('{"model_type": "lama"}', ("model type 'lama'", "llama")),
        ('{"model_type": "zzzzzzzzzzz"}', ("model type 'zzzzzzzzzzz'",)),
        ('{"model_type": "llama", "hidden_size": "wide"}', ("llama configuration", "hidden_size")),
    ],
)
def test_a_config_that_is_none_is_refused(tmp_path: Path, text: str | None, words: tuple[str, ...]) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    refused(ModelError, lambda: find_source(str(tmp_path)), *words)


def test_a_model_that_writes_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ModelError, match="cannot be built"):
        shape_model(from_mapping({"model": str(tmp_path)}))


def test_remote_code_runs_only_with_consent(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.MineConfig"}})
    )
    (tmp_path / "configuration_mine.py").write_text(
        "from pathlib import Path\n"
        "from transformers import PretrainedConfig\n"
        f"Path({str(marker)!r}).touch()\n"
        "class MineConfig(PretrainedConfig):\n"
        "    model_type = 'mine'\n"
    )
    refused(ModelError, lambda: find_source(str(tmp_path)), "its own Python code", "trust-remote-code")
    assert not marker.exists()
    source = find_source(str(tmp_path), trust_remote_code=True)
    assert marker.exists()
    assert source.trust_remote_code  # building the model needs it too


def test_rows_longer_than_the_positions_are_refused(bench) -> None:  # type: ignore[no-untyped-def]
    run = bench.run(bench.folder("gpt2"), data={"max_length": 65})
    refused(ModelError, lambda: shape_model(run), "65", "positions for 64", "lower data.max_length to 64")
    shape_model(bench.run(bench.folder("gpt2"), data={"max_length": 64}))


def test_lora_targets_that_match_nothing_show_what_exists(bench) -> None:  # type: ignore[no-untyped-def]
    run = bench.run(bench.folder("llama"), method="lora", lora={"targets": ["query"]})
    refused(UsageError, lambda: shape_model(run), "match nothing", "q_proj", "down_proj")


def test_modules_to_save_that_do_not_exist_are_refused(bench) -> None:  # type: ignore[no-untyped-def]
    run = bench.run(bench.folder("llama"), method="lora", lora={"save_modules": ["lm_haed"]})
    refused(UsageError, lambda: shape_model(run), "lm_haed", "lm_head")


def test_qlora_of_a_model_without_linears_is_refused(bench) -> None:  # type: ignore[no-untyped-def]
    refused(UsageError, lambda: shape_model(bench.run(bench.folder("gpt2"), method="qlora")), "nf4", "method: lora")


def test_dora_over_quantised_weights_is_refused(bench) -> None:  # type: ignore[no-untyped-def]
    run = bench.run(bench.folder("llama"), method="qlora", lora={"variant": "dora"})
    refused(UsageError, lambda: shape_model(run), "DoRA")


@pytest.mark.parametrize("loss", ["fused", "chunked"])
def test_a_loss_that_would_bypass_an_adapted_head_is_refused(bench, loss: str) -> None:  # type: ignore[no-untyped-def]
    model, lora = bench.folder("llama"), {"targets": ["q_proj", "lm_head"]}
    refused(UsageError, lambda: bench.step(model, {"loss": loss}, method="lora", lora=lora), "bypass", "loss: plain")
    run = bench.run(model, {"loss": loss}, method="lora", lora=lora, precision="bf16")
    refused(UsageError, lambda: forecast(run), "bypass")
    bench.step(model, method="lora", lora=lora)


@pytest.mark.parametrize(
    ("family", "words"), [("gemma2", "soft-capped"), ("gpt_oss", "sinks"), ("t5", "encoder-decoder")]
)
def test_unpadded_is_refused_where_no_kernel_keeps_rows_apart(bench, family: str, words: str) -> None:  # type: ignore[no-untyped-def]
    run = bench.run(bench.folder(family), {"layout": "unpadded"}, precision="bf16")
    refused(UsageError, lambda: assemble(run, shape_model(run), HOPPER), words, "layout: padded")
    refused(UsageError, lambda: forecast(run), words)


@pytest.mark.parametrize(
    ("family", "kernel", "precision"),
    [("gemma2", "flash", "bf16"), ("gemma2", "efficient", "bf16"), ("t5", "flash", "bf16"), ("llama", "flash", "fp32")],
)
def test_a_pinned_kernel_that_cannot_do_the_attention_is_refused(bench, family, kernel, precision) -> None:  # type: ignore[no-untyped-def]
    run = bench.run(bench.folder(family), {"attention": kernel}, precision=precision)
    refused(UsageError, lambda: assemble(run, shape_model(run), HOPPER), f"{kernel} kernel", "pin.attention")


def test_an_unknown_kernel_and_one_that_needs_a_gpu_are_refused(bench) -> None:  # type: ignore[no-untyped-def]
    model = bench.folder("llama")
    refused(UsageError, lambda: bench.step(model, {"attention": "sdpa"}), "'sdpa' is not known", "exact")
    refused(UsageError, lambda: bench.step(model, {"attention": "flash"}), "flash kernel")


def test_a_layer_to_recompute_that_does_not_exist_is_refused(bench) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match="layer 7, the model has 0 to 1"):
        bench.step(bench.folder("llama"), {"recompute": [1, 7]})


def test_an_8_bit_optimizer_without_its_package_names_the_install_line(bench) -> None:  # type: ignore[no-untyped-def]
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        with pytest.raises(MissingPackage) as caught:
            bench.step(bench.folder("llama"), optimizer={"name": "adamw-8bit"})
        assert "pip install" in caught.value.hint


def test_an_unknown_gpu_is_refused_before_a_model_is_looked_for() -> None:
    run = from_mapping({"model": "no-such-model", "hardware": {"gpu": "a100g"}})
    refused(UnknownName, lambda: forecast(run), "a100g")


def test_an_auxiliary_loss_is_not_dropped_in_silence(bench) -> None:  # type: ignore[no-untyped-def]
    run = bench.run(bench.folder("qwen3_moe", output_router_logits=True))
    refused(ModelError, lambda: shape_model(run), "auxiliary loss", "output_router_logits: false")
