from dataclasses import asdict
from itertools import product

import pytest

from brimful.core.errors import RunFileError
from brimful.core.precision import BITS, PRESETS, Precision


@pytest.mark.parametrize(
    ("name", "autocast", "loss_scaling"),
    [("bf16", False, False), ("fp32-autocast", True, False), ("fp16-scaled", True, True), ("fp32", False, False)],
)
def test_presets_autocast_where_compute_differs_and_scale_where_it_is_fp16(
    name: str, autocast: bool, loss_scaling: bool
) -> None:
    precision = Precision.parse(name)
    assert (precision.autocast, precision.loss_scaling) == (autocast, loss_scaling)
    assert precision.adapter == "fp32"


@pytest.mark.parametrize("weights", BITS)
def test_missing_keys_follow_the_weights_and_the_adapter_is_fp32(weights: str) -> None:
    precision = Precision.parse({"weights": weights})
    assert precision.compute == precision.gradients == precision.optimizer == weights
    assert precision.adapter == ("fp64" if weights == "fp64" else "fp32")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_and_its_mapping_are_the_same(name: str) -> None:
    assert Precision.parse(asdict(PRESETS[name])) == PRESETS[name]
    assert PRESETS[name].to_mapping() == name


def refusal(values: tuple[str, ...]) -> RunFileError | None:
    try:
        Precision(*values)
    except RunFileError as error:
        return error
    return None


def test_every_combination_is_either_refused_by_key_or_reads_back_the_same() -> None:
    refusals = {values: refusal(values) for values in product(BITS, repeat=5)}
    accepted = [Precision(*values) for values, error in refusals.items() if error is None]
    assert 10 < len(accepted) < len(refusals) / 2
    assert all(error.message.startswith("precision.") and error.hint for error in refusals.values() if error)
    for precision in accepted:
        assert Precision.parse(precision.to_mapping()) == precision
        assert BITS[precision.optimizer] >= BITS[precision.weights]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("bf15", "bf16"),
        ({"weight": "bf16"}, "weights"),
        ({"weights": "fp8"}, "precision.weights"),
        ({"weights": "fp32", "optimizer": "bf16"}, "precision.optimizer"),
        ({"weights": "fp32", "gradients": "fp16"}, "precision.gradients"),
        ({"weights": "bf16", "compute": "fp32"}, "precision.compute"),
        ({"weights": "bf16", "compute": "fp16"}, "precision.compute"),
        ({"adapter": "fp16"}, "precision.adapter"),
        (16, "precision"),
    ],
)
def test_a_wrong_precision_is_refused_and_the_key_is_named(given: object, named: str) -> None:
    with pytest.raises(RunFileError) as error:
        Precision.parse(given)  # type: ignore[arg-type]
    assert named in f"{error.value.message} {error.value.hint}"
