"""Laws of the model catalogue."""

import json
import subprocess
import sys
from datetime import date
from importlib.resources import files

import pytest

from brimful.catalog.models import ModelEntry, find_model, get_model, model_names
from brimful.core.errors import UnknownName

FAMILIES = {"mistral", "mixtral", "llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi", "phi3"} | {
    "olmo2",
    "gpt2",
    "gpt_neox",
    "t5",
}
# counts that the models' publishers state, spelled out a second time on purpose
PUBLISHED = {
    "mistral-7b-v0.3": 7_248_023_552,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-2-2b": 2_614_341_888,
    "smollm2-135m": 134_515_008,
    "gpt2": 124_439_808,
    "pythia-1.4b": 1_414_647_808,
    "flan-t5-xl": 2_849_757_184,
    "phi-3-mini-4k": 3_821_079_552,
    "olmo-2-7b": 7_298_617_344,
}
# a handful that is another one every day, and the same for everybody on that day
ROTATION = 10
TODAY = tuple(name for i, name in enumerate(model_names()) if i % ROTATION == date.today().toordinal() % ROTATION)


def every_model() -> list[ModelEntry]:
    return [get_model(name) for name in model_names()]


def test_the_catalogue_is_large_enough_and_has_every_family():
    assert len(model_names()) >= 36
    assert {entry.model_type for entry in every_model()} == FAMILIES


@pytest.mark.parametrize("name", model_names())
def test_a_model_file_is_complete_and_named_as_its_entry(name: str):
    data = json.loads(files("brimful.catalog").joinpath("models", f"{name}.json").read_text(encoding="utf-8"))
    assert data["name"] == name
    assert data["parameters"] > 0
    assert data["source"]
    assert data["hub_id"] or name == "s3-small"
    assert {"model_type", "vocab_size", "tie_word_embeddings", "architectures"} <= data["config"].keys()
    overridden = {key for variant in data.get("variants", {}).values() for key in variant}
    assert overridden <= data["config"].keys()


def test_no_two_entries_answer_to_one_name():
    spelled = [name.casefold() for entry in every_model() for name in entry.names()]
    assert len(spelled) == len(set(spelled))


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_published_counts_are_the_catalogues(name: str, parameters: int):
    assert get_model(name).parameters == parameters


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("mistral-7b-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b-v0.3"),
        ("MISTRALAI/mistral-7b-V0.3", "mistral-7b-v0.3"),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("google/flan-t5-xl", "flan-t5-xl"),
        ("Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("gpt2-small", "gpt2"),
    ],
)
def test_a_model_is_found_by_name_alias_and_hub_id_in_any_case(spelling: str, name: str):
    entry = find_model(spelling)
    assert entry is not None
    assert entry.name == name


def test_a_variant_keeps_the_weights_and_changes_what_its_publisher_changed():
    base, instruct = get_model("Qwen/Qwen2.5-7B"), get_model("Qwen/Qwen2.5-7B-Instruct")
    assert instruct.hub_id == "Qwen/Qwen2.5-7B-Instruct"
    assert instruct.parameters == base.parameters
    assert (base.config["max_position_embeddings"], instruct.config["max_position_embeddings"]) == (131072, 32768)
    assert base.config["hidden_size"] == instruct.config["hidden_size"]


def test_an_unknown_model_offers_the_nearest():
    assert find_model("nobody/nothing-of-the-kind") is None
    with pytest.raises(UnknownName) as refused:
        get_model("mistral-7b-v0.4")
    assert "mistral-7b-v0.3" in refused.value.nearest


def test_looking_up_needs_neither_torch_nor_transformers():
    code = (
        "import sys; from brimful.catalog.gpus import find_gpu; from brimful.catalog.models import find_model; "
        "assert find_gpu('g5.xlarge') and find_model('google/flan-t5-xl'); "
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    path = [entry for entry in sys.path if entry]
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(path)}, timeout=60)


@pytest.mark.parametrize("name", TODAY)
def test_a_model_built_from_its_config_has_its_parameters(name: str):
    check_build(get_model(name))


@pytest.mark.full
@pytest.mark.parametrize("name", model_names())
def test_every_model_built_from_its_config_has_its_parameters(name: str):
    check_build(get_model(name))


def check_build(entry: ModelEntry) -> None:
    """Build on the meta device: the count is exact, and transformers understood the hub's spelling of the config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    given = dict(entry.config)
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    auto = AutoModelForSeq2SeqLM if entry.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)

    assert type(model).__name__ in entry.config["architectures"]
    shared = {id(parameter) for parameter in model.parameters()}
    for name in entry.untied:
        assert entry.config["tie_word_embeddings"] is False
        tied = model.get_parameter(name)
        assert id(tied) in shared, f"{name} is no longer tied by transformers: drop `untied`"
        assert sum(other is tied for _, other in model.named_parameters(remove_duplicate=False)) > 1
    apart = sum(model.get_parameter(name).numel() for name in entry.untied)
    assert sum(parameter.numel() for parameter in model.parameters()) + apart == entry.parameters

    check_config(entry, config)


def check_config(entry: ModelEntry, config) -> None:
    """What decides memory and mathematics survived the conversion."""
    given = entry.config
    if not entry.untied:
        assert config.tie_word_embeddings == given["tie_word_embeddings"]
    if "rope_theta" in given:
        ropes = config.rope_parameters
        ropes = list(ropes.values()) if "full_attention" in ropes else [ropes]
        assert given["rope_theta"] in [rope["rope_theta"] for rope in ropes]
        scaling = given.get("rope_scaling")
        if scaling:
            kind = scaling.get("rope_type", scaling.get("type"))
            assert kind in [rope["rope_type"] for rope in ropes]
    if given.get("sliding_window") and given.get("use_sliding_window", True):
        assert config.sliding_window == given["sliding_window"]
    if "use_sliding_window" in given:
        assert config.sliding_window is None
    if given["model_type"] in ("gemma2", "gemma3_text"):
        every = 2 if given["model_type"] == "gemma2" else 6
        expected = [
            "full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(len(config.layer_types))
        ]
        assert config.layer_types == expected
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "head_dim", "num_key_value_heads", "dropout_rate"):
        if given.get(key) is not None:
            assert getattr(config, key) == given[key]
