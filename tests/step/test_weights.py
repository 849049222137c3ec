"""Weights from files: equal to what transformers loads, refused when damaged, in host RAM that does not grow."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from brimful.core.errors import ModelError
from brimful.core.precision import Precision
from brimful.core.runfile import from_mapping
from brimful.step.assemble import shape_model
from brimful.step.model import TrainModel, build, materialise
from brimful.step.nf4 import BLOCK, NF4Linear, fill_from, quantize
from brimful.step.shards import INDEX, PIECE, SINGLE
from brimful.step.source import find_source
from brimful.step.weights import _Staging, load_weights, weights_for

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {
    "llama": ("llama", SMALL | {"tie_word_embeddings": False}),
    "llama-tied": ("llama", SMALL | {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", GPT2),
    "gemma2": ("gemma2", SMALL),  # has a buffer that no file holds, beside a weight that it does
    "t5": ("t5", T5),
    "t5-untied": ("t5", T5),
    "qwen3_moe": ("qwen3_moe", SMALL | EXPERTS),
    "mixtral": ("mixtral", SMALL | EXPERTS),
}
KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def write(folder: Path, name: str, *, stored: str = "fp32", shard: str = "1GB", **others: int) -> type[PreTrainedModel]:
    """A folder as save_pretrained writes it."""
    kind, values = FAMILIES[name]
    values = values | others
    family = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    torch.manual_seed(0)
    model = family.from_config(AutoConfig.for_model(kind, **values), dtype=KINDS[stored])
    if name == "t5-untied":
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.save_pretrained(folder, max_shard_size=shard)
    return family


def empty_model(folder: Path, method: str = "full", weights: str = "fp32", **lora: object) -> TrainModel:
    """The model with memory that holds no number yet."""
    precision = {"weights": weights, "compute": weights, "gradients": "fp32", "optimizer": "fp32", "adapter": "fp32"}
    run = {"model": str(folder), "method": method, "precision": precision, "data": {"max_length": 32}}
    model = shape_model(from_mapping(run | ({"lora": lora} if lora else {})))
    materialise(model, torch.device("cpu"))
    with torch.no_grad():
        for tensor in (*model.module.parameters(), *model.module.buffers()):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 255)
    return model


def tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def assert_same(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    ours, theirs = tensors(found), tensors(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_is_what_transformers_would_have_loaded(name: str, shard: str, tmp_path: Path) -> None:
    family = write(tmp_path, name, shard=shard)
    assert (tmp_path / INDEX).exists() == (shard == "20KB")
    model = empty_model(tmp_path)
    report = load_weights(model, tmp_path)
    assert report.unexpected == ()
    assert_same(model.module, family.from_pretrained(tmp_path))


@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("stored", KINDS)
def test_any_stored_type_becomes_any_type_of_weights(stored: str, weights: str, tmp_path: Path) -> None:
    family = write(tmp_path, "llama", stored=stored)
    model = build(find_source(str(tmp_path)), Precision(weights, weights, "fp32", "fp32", "fp32"))
    materialise(model, torch.device("cpu"))
    load_weights(model, tmp_path)
    assert_same(model.module, family.from_pretrained(tmp_path, dtype=KINDS[weights]))
    original = load_file(tmp_path / SINGLE)["lm_head.weight"]
    staged = _Staging().convert(original.view(-1), KINDS[weights])  # what a GPU would be sent
    assert torch.equal(staged, model.base.lm_head.weight.detach().view(-1))


def test_a_tensor_of_several_pieces_arrives_whole(tmp_path: Path) -> None:
    family = write(tmp_path, "llama", vocab_size=PIECE // 32 + 1000)
    model = empty_model(tmp_path)
    load_weights(model, tmp_path)
    assert_same(model.module, family.from_pretrained(tmp_path))
    whole = load_file(tmp_path / SINGLE)["lm_head.weight"]
    in_pieces = NF4Linear(*reversed(whole.shape), bias=False)
    fill_from(in_pieces, whole.view(-1).split(BLOCK * 9000))
    for ours, theirs in zip(in_pieces.state_dict().values(), quantize(whole).state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_head_stored_with_other_values_is_untied_and_one_with_the_same_is_not(tmp_path: Path) -> None:
    write(tmp_path, "t5-untied")
    base = empty_model(tmp_path).base
    assert base.lm_head.weight is not base.shared.weight
    assert base.encoder.embed_tokens.weight is base.shared.weight
    values = load_file(tmp_path / SINGLE)
    save_file(values | {"lm_head.weight": values["shared.weight"].clone()}, tmp_path / SINGLE)
    base = empty_model(tmp_path).base
    assert base.lm_head.weight is base.shared.weight


def test_the_base_model_s_prefix_may_be_missing_and_keys_without_use_are_listed(tmp_path: Path) -> None:
    family = write(tmp_path, "gpt2")
    expected = family.from_pretrained(tmp_path)
    values = {name.removeprefix("transformer."): value for name, value in load_file(tmp_path / SINGLE).items()}
    save_file(values | {"h.0.attn.masked_bias": torch.zeros(1)}, tmp_path / SINGLE)
    model = empty_model(tmp_path)
    assert load_weights(model, tmp_path).unexpected == ("h.0.attn.masked_bias",)
    assert_same(model.module, expected)


@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_adapters_begin_by_changing_nothing(variant: str, tmp_path: Path) -> None:
    family = write(tmp_path, "llama")
    expected = family.from_pretrained(tmp_path).eval()
    model = empty_model(tmp_path, "lora", variant=variant, save_modules=["lm_head"])
    load_weights(model, tmp_path, seed=1)
    ids = torch.arange(8).unsqueeze(0)
    expected_logits = expected(ids).logits
    with torch.no_grad():
        hidden = expected.model(ids)[0]
        layer, plain = model.base.model.layers[0].self_attn.q_proj, expected.model.layers[0].self_attn.q_proj
        torch.testing.assert_close(layer.eval()(hidden), plain(hidden))
        torch.testing.assert_close(model.head(hidden), expected_logits)
    drawn = layer.lora_A["default"].weight
    assert drawn.std() > 0
    again = empty_model(tmp_path, "lora", variant=variant, save_modules=["lm_head"])
    load_weights(again, tmp_path, seed=1)
    assert torch.equal(again.base.model.layers[0].self_attn.q_proj.lora_A["default"].weight, drawn)


def test_every_linear_of_a_qlora_model_is_packed_as_it_arrives(tmp_path: Path) -> None:
    write(tmp_path, "llama", stored="bf16")
    model = empty_model(tmp_path, "qlora", weights="bf16")
    load_weights(model, tmp_path)
    values = load_file(tmp_path / SINGLE)
    layers = {n.replace(".base_layer", ""): m for n, m in model.base.named_modules() if isinstance(m, NF4Linear)}
    assert len(layers) == 14
    for name, layer in layers.items():
        expected = quantize(values[f"{name}.weight"])
        for ours, theirs in zip(layer.state_dict().values(), expected.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs), name
    assert torch.equal(model.base.model.embed_tokens.weight, values["model.embed_tokens.weight"])


def test_a_folder_without_weights_gets_random_ones_and_one_in_another_format_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    assert weights_for(empty_model(tmp_path)).func is load_weights
    assert weights_for(empty_model(tmp_path), scratch=True).func is not load_weights
    (tmp_path / SINGLE).unlink()
    assert weights_for(empty_model(tmp_path)).func is not load_weights
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        weights_for(empty_model(tmp_path))


def test_missing_tensors_are_named_before_anything_is_read(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_moe")
    values = load_file(tmp_path / SINGLE)
    lost = [n for n in values if "layers.0.self_attn" in n] + ["model.layers.1.mlp.experts.2.up_proj.weight"]
    model = empty_model(tmp_path)
    save_file({n: v for n, v in values.items() if n not in lost}, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=r"lack model\.layers\.0\.self_attn\.\w+\.weight, .+, .+ and \d more"):
        load_weights(model, tmp_path)
    assert model.base.model.norm.weight.isnan().all()
    save_file({n: v for n, v in values.items() if n != lost[-1]}, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=r"lack model\.layers\.1\.mlp\.experts\.gate_up_proj$"):
        load_weights(model, tmp_path)


def test_a_wrong_shape_or_kind_names_file_and_tensor(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    values, model = load_file(tmp_path / SINGLE), empty_model(tmp_path)
    save_file(values | {"model.norm.weight": torch.ones(31)}, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=r"model\.safetensors: model\.norm\.weight has shape \[31\].* expects \[32\]"):
        load_weights(model, tmp_path)
    save_file(values | {"model.norm.weight": torch.ones(32, dtype=torch.uint8)}, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=r"model\.norm\.weight is stored as U8"):
        load_weights(model, tmp_path)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: data[:-100], r"is cut off: \S+ ends at byte"),
        (lambda data: data[:4], "is not a safetensors file"),
        (lambda data: b"", "is not a safetensors file"),
        (lambda data: b"\xff" * 8 + data[8:], "is not a safetensors file: its header would be"),
        (lambda data: data[:8] + b"garbage!" + data[16:], "is not a safetensors file"),
        (lambda data: (2).to_bytes(8, "little") + b"[]", "is not a safetensors file: its header is not an object"),
        (lambda data: data.replace(b'"shape":[32]', b'"shape":[33]', 1), r"the header's entry for \S+ is damaged"),
        (lambda data: data.replace(b'"data_offsets"', b'"lost_offsets"', 1), r"the header's entry for \S+ is damaged"),
    ],
)
def test_a_damaged_file_is_named(damage, says: str, tmp_path: Path) -> None:
    write(tmp_path, "llama")
    model = empty_model(tmp_path)
    path = tmp_path / SINGLE
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError, match=says) as error:
        load_weights(model, tmp_path)
    assert str(path) in error.value.message


def test_a_damaged_index_and_a_lost_shard_are_named(tmp_path: Path) -> None:
    write(tmp_path, "llama", shard="20KB")
    model, index = empty_model(tmp_path), tmp_path / INDEX
    intact = index.read_text()
    for garbage in ("not json", "[]", '{"weight_map": 3}'):
        index.write_text(garbage)
        with pytest.raises(ModelError, match="is not an index of shards"):
            load_weights(model, tmp_path)
    names = json.loads(intact)
    names["weight_map"]["model.ghost"] = next(iter(names["weight_map"].values()))
    index.write_text(json.dumps(names))
    with pytest.raises(ModelError, match=r"has no tensor model\.ghost"):
        load_weights(model, tmp_path)
    index.write_text(intact)
    lost = sorted(tmp_path.glob("model-*.safetensors"))[0]
    lost.unlink()
    with pytest.raises(ModelError, match=f"{lost.name} is not there"):
        load_weights(model, tmp_path)


LOAD_APART = """
import sys
from pathlib import Path
from brimful.core.runfile import from_mapping
from brimful.step.assemble import shape_model
from brimful.step.weights import load_weights

def kib(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))

folder, method = sys.argv[1:]
model = shape_model(from_mapping({"model": folder, "method": method, "data": {"max_length": 32}}))
before = kib("VmRSS")
report = load_weights(model, Path(folder))  # on the meta device: only the loader's own memory counts
print(report.bytes >> 20, (kib("VmHWM") - before) >> 10)
"""


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 MB in fp32, of which the embedding and the head are 180 MB each."""
    folder = tmp_path_factory.mktemp("large")
    large = {"vocab_size": 45_000, "hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 16}
    config = AutoConfig.for_model("llama", **(SMALL | large | {"head_dim": 64, "tie_word_embeddings": False}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.zero_()
    model.save_pretrained(folder, max_shard_size="300MB")
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads peak memory from /proc")
@pytest.mark.parametrize("method", ["full", "qlora"])
def test_host_memory_does_not_grow_with_the_model(method: str, large_folder: Path) -> None:
    command = [sys.executable, "-c", LOAD_APART, str(large_folder), method]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    read, grown = map(int, done.stdout.split())
    assert read > 380
    assert grown < 80, "32 MiB to read fp32, 16 to convert it, and what the first use of a kernel brings in"
