"""Tiny models of real families, built through the real path: a folder with a config.json, a run file, a step."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from brimful.core.runfile import RunFile, from_mapping
from brimful.step.assemble import assemble, batch_of, random_weights, shape_model
from brimful.step.batch import MicroBatch, Row
from brimful.step.model import TrainModel
from brimful.step.step import TrainStep
from brimful.step.target import Target

FP64 = {"weights": "fp64", "compute": "fp64", "gradients": "fp64", "optimizer": "fp64", "adapter": "fp64"}
VOCABULARY = 61
_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_GEMMA = {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _DECODER,
    "mistral": _DECODER | {"sliding_window": 4},
    "qwen3": _DECODER | {"head_dim": 8},
    "gemma2": _DECODER | _GEMMA | {"final_logit_softcapping": 1.5, "attn_logit_softcapping": 0.5},
    "gemma3_text": _DECODER | _GEMMA,
    "gpt2": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "eos_token_id": 1},
    "gpt_neox": _DECODER | {"hidden_dropout": 0.1, "num_key_value_heads": 4},
    "phi3": _DECODER | {"resid_pdrop": 0.1, "embd_pdrop": 0.1},
    "olmo2": _DECODER,
    "granite": _DECODER | {"logits_scaling": 4.0},
    "cohere": _DECODER | {"logit_scale": 0.25},
    "qwen3_moe": _DECODER | _EXPERTS | {"head_dim": 8, "decoder_sparse_step": 1},
    "gpt_oss": _DECODER | _EXPERTS | {"head_dim": 8, "sliding_window": 4, "rope_parameters": _ROPE},
    "t5": {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.1,
        "decoder_start_token_id": 0,
    },
}  # fmt: skip
LENGTHS = (9, 4, 1, 13, 6)


def spread(model: TrainModel) -> None:
    """Weights large enough for softcaps, scales and positions to show in the loss."""
    random_weights(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.module.parameters():
            if parameter.is_floating_point() and parameter.dim() > 1:
                parameter.mul_(8)
            elif parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


class Bench:
    """Makes folders, runs, steps and batches; pins go by their names in the run file."""

    fp64 = FP64

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, family: str, **changes: Any) -> str:
        folder = self.root / f"{family}-{len(list(self.root.iterdir()))}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": family} | CONFIGS[family] | changes))
        return str(folder)

    def run(self, model: str, pin: dict[str, Any] | None = None, **keys: Any) -> RunFile:
        base = {"model": model, "precision": FP64, "data": {"max_length": 16}, "batch": 4, "seed": 3}
        return from_mapping({**base, "optimizer": {"learning_rate": 1e-3}, **keys, "pin": pin or {}})

    def step(self, model: str, pin: dict[str, Any] | None = None, **keys: Any) -> TrainStep:
        return self.step_of(self.run(model, pin, **keys))

    def step_of(self, run: RunFile) -> TrainStep:
        return assemble(run, shape_model(run), Target("cpu"), fill=spread)

    def rows(self, step: TrainStep) -> list[Row]:
        """Rows of different lengths, one of them without a target, with labels that are ignored."""
        generator = torch.Generator().manual_seed(1)

        def tokens(count: int) -> list[int]:
            return torch.randint(2, VOCABULARY, (count,), generator=generator).tolist()

        rows = []
        for number, length in enumerate(LENGTHS):
            ids = tokens(length)
            labels = [-100] * (length // 3) + ids[length // 3 :]
            if step.model.source.encoder_decoder:
                labels = [*tokens(2 * number), -100, *tokens(2)]
            rows.append(Row(100 + 7 * number, ids, labels))
        return rows

    def batches(self, step: TrainStep, slices: Sequence[int], number: int = 0, **pin: Any) -> list[MicroBatch]:
        run = self.run(step.model.source.name, pin)
        rows, batches, start = self.rows(step), [], 0
        for count in slices:
            batches.append(batch_of(run, step.model.source, rows[start : start + count], number))
            start += count
        return batches


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices are multiplied fastest by one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)
