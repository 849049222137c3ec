"""Laws of the GPU and instance catalogue."""

from dataclasses import FrozenInstanceError, fields

import pytest

from brimful.catalog.gpus import Gpu, find_gpu, find_instance, get_gpu, gpu_names, instance_names
from brimful.core.errors import ExitCode, UnknownName
from brimful.core.units import GiB

CAPABILITIES = {
    "pascal": {(6, 0)},
    "volta": {(7, 0)},
    "turing": {(7, 5)},
    "ampere": {(8, 0), (8, 6)},
    "ada": {(8, 9)},
    "hopper": {(9, 0)},
    "blackwell": {(10, 0), (10, 3), (12, 0)},
}
MEASURED = {"h200"}
# what PyTorch can really reserve: the caps that stand-in runs use
CAPS_GIB = {"a10g": 21.5, "rtx-5090": 30.7, "l40s": 43.8, "a40": 43.8, "t4": 14.2, "a100-40": 38.9, "h100-80": 78.6}


def every_gpu() -> list[Gpu]:
    return [get_gpu(name) for name in gpu_names()]


def test_the_catalogue_is_large_enough():
    assert len(gpu_names()) >= 40
    assert len(instance_names()) >= 20


@pytest.mark.parametrize("gpu", every_gpu(), ids=gpu_names())
def test_a_gpu_is_complete_and_says_where_its_figures_come_from(gpu: Gpu):
    optional = {"bf16_tflops", "tf32_tflops", "aliases"}
    assert all(getattr(gpu, field.name) not in (None, "") for field in fields(gpu) if field.name not in optional)
    assert gpu.capability in CAPABILITIES[gpu.architecture]
    assert len(gpu.source) > 40


@pytest.mark.parametrize("gpu", every_gpu(), ids=gpu_names())
def test_reservable_is_what_the_context_leaves_of_what_cuda_reports(gpu: Gpu):
    assert 0 < gpu.reservable < gpu.total <= gpu.memory
    assert gpu.reservable_mib == gpu.cuda_mib - gpu.context_mib
    assert 300 <= gpu.context_mib <= 1000
    # the driver keeps a little for itself, never a tenth
    assert gpu.total > 0.94 * gpu.memory


@pytest.mark.parametrize("gpu", every_gpu(), ids=gpu_names())
def test_dense_rates_are_ordered_as_the_hardware_is(gpu: Gpu):
    assert gpu.fp16_tflops >= gpu.fp32_tflops > 0
    has_bf16 = gpu.capability >= (8, 0)
    assert (gpu.bf16_tflops is not None) == has_bf16
    assert (gpu.tf32_tflops is not None) == has_bf16
    if gpu.bf16_tflops is not None and gpu.tf32_tflops is not None:
        assert gpu.bf16_tflops == gpu.fp16_tflops
        assert gpu.bf16_tflops == pytest.approx(2 * gpu.tf32_tflops, rel=0.05)
        # a sparse rate slipped in would be twice as high: 1,000 dense TFLOP/s per 3 TB/s is more than any card has
        assert gpu.bf16_tflops / gpu.bandwidth_gbs < 0.45


def test_only_what_was_measured_is_marked_measured():
    assert {gpu.name for gpu in every_gpu() if gpu.measured} == MEASURED
    assert {gpu.name for gpu in every_gpu() if gpu.context_measured} == MEASURED
    assert {gpu.name for gpu in every_gpu() if gpu.cuda_kind == "measured"} == MEASURED


@pytest.mark.parametrize(("name", "cap_gib"), CAPS_GIB.items())
def test_the_caps_of_the_stand_in_runs_are_the_catalogues(name: str, cap_gib: float):
    assert get_gpu(name).reservable / GiB == pytest.approx(cap_gib, abs=0.001)


def test_no_two_entries_answer_to_one_name():
    spelled = [name for gpu in every_gpu() for name in (gpu.name, *gpu.aliases)]
    for name in instance_names():
        instance = find_instance(name)
        assert instance is not None
        spelled += [instance.name, *instance.aliases]
    folded = [name.casefold() for name in spelled]
    assert len(folded) == len(set(folded))


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("a10g", "a10g"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("rtx_5090", "rtx-5090"),
        ("5090", "rtx-5090"),
        ("Tesla T4", "t4"),
        ("NVIDIA H100 80GB HBM3", "h100-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("g5.4xlarge", "a10g"),
        ("ml.g5.2xlarge", "a10g"),
        ("standard_nc40ads_h100_v5", "h100-nvl"),
    ],
)
def test_a_card_is_found_by_what_people_and_drivers_call_it(spelling: str, name: str):
    gpu = find_gpu(spelling)
    assert gpu is not None
    assert gpu.name == name


@pytest.mark.parametrize("name", instance_names())
def test_an_instance_names_a_known_gpu_and_dates_its_price(name: str):
    instance = find_instance(name)
    assert instance is not None
    assert find_gpu(name) is instance.gpu
    assert instance.count >= 1
    assert instance.host_ram_gib >= 16
    assert (instance.usd_per_hour is None) == (instance.price_date is None)
    if instance.usd_per_hour is not None and instance.spot_usd_per_hour is not None:
        assert instance.spot_usd_per_hour < instance.usd_per_hour
    assert instance.source


def test_a_larger_g5_has_the_same_gpu():
    assert find_gpu("ml.g5.2xlarge") is find_gpu("ml.g5.xlarge")


def test_an_unknown_gpu_offers_the_nearest():
    assert find_gpu("abacus") is None
    with pytest.raises(UnknownName) as refused:
        get_gpu("rtx 5900")
    assert "rtx-5090" in refused.value.nearest
    assert refused.value.exit_code == ExitCode.USAGE


def test_a_gpu_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        get_gpu("a10g").memory_mib = 1  # type: ignore[misc]
