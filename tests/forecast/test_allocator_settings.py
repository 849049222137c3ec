"""Settings read PyTorch's own notation and round as PyTorch rounds."""

import pytest

from brimful.core.errors import UsageError
from brimful.forecast.allocator import Settings

MIB = 1 << 20


def test_nothing_said_is_pytorchs_default() -> None:
    assert Settings.parse("") == Settings()


def test_options_are_read_in_pytorchs_notation() -> None:
    text = (
        "expandable_segments:True, max_split_size_mb:128,roundup_power2_divisions:16,garbage_collection_threshold:0.7"
    )
    assert Settings.parse(text) == Settings(
        expandable_segments=True,
        max_split_size=128 * MIB,
        roundup_power2_divisions=16,
        garbage_collection_threshold=0.7,
    )
    assert Settings.parse("large_segment_size_mb:64,max_non_split_rounding_mb:80") == Settings(
        large_segment_size=64 * MIB, max_non_split_rounding=80 * MIB
    )


def test_the_list_of_divisions_covers_all_below_its_first_and_above_its_last_entry() -> None:
    divisions = Settings.parse("roundup_power2_divisions:[4:8,16:2,>:1]").roundup_power2_divisions
    # 1, 2, 4 MiB as the first entry says; 8 MiB is between two entries, and PyTorch leaves it alone; 16 MiB; the rest.
    assert divisions == (8, 8, 8, 0, 2) + (1,) * 11


@pytest.mark.parametrize(
    "text",
    [
        "max_splitsize_mb:128",
        "max_split_size_mb:19",
        "max_split_size_mb:many",
        "max_split_size_mb",
        "expandable_segments:yes",
        "garbage_collection_threshold:1.0",
        "garbage_collection_threshold:none",
        "large_segment_size_mb:10",
        "large_segment_size_mb:64,max_split_size_mb:32",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:[3:4]",
        "roundup_power2_divisions:[4:3]",
        "roundup_power2_divisions:[4",
        "backend:cudaMallocAsync",
        "per_process_memory_fraction:0.5",
    ],
)
def test_what_pytorch_would_refuse_or_we_cannot_simulate_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Settings.parse(text)


def test_an_unknown_option_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(UsageError) as error:
        Settings.parse("max_split_size:128")
    assert "max_split_size_mb" in (error.value.hint or "")


def test_options_without_effect_on_the_device_are_let_through() -> None:
    assert Settings.parse("backend:native,pinned_use_background_threads:True") == Settings()


@pytest.mark.parametrize(("size", "rounded"), [(1, 512), (512, 512), (513, 1024), (3 * MIB + 1, 3 * MIB + 512)])
def test_sizes_are_rounded_up_to_512_bytes(size: int, rounded: int) -> None:
    assert Settings().rounded(size) == rounded


@pytest.mark.parametrize(
    ("size", "rounded"),
    [
        (1200, 1536),  # under 512 × 4: plain rounding to 512
        (5000, 5120),  # between 4096 and 8192 there are four steps of 1024
        (5121, 6144),
        (4096, 4096),  # a power of two is itself
        (9 * MIB, 10 * MIB),  # 8, 10, 12, 14, 16
        (15 * MIB, 16 * MIB),
    ],
)
def test_sizes_are_rounded_up_to_a_division_of_a_power_of_two(size: int, rounded: int) -> None:
    assert Settings(roundup_power2_divisions=4).rounded(size) == rounded


def test_each_interval_rounds_by_its_own_divisions() -> None:
    settings = Settings.parse("roundup_power2_divisions:[4:1,8:2,>:4]")
    assert settings.rounded(5 * MIB + 1) == 5 * MIB + 512  # one division is none
    assert settings.rounded(9 * MIB) == 12 * MIB
    assert settings.rounded(17 * MIB) == 20 * MIB
    assert settings.rounded(1100 << 30) == 1280 << 30  # beyond the table its last entry holds


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
    ],
)
def test_a_segment_has_2_or_20_mib_or_a_multiple_of_2(size: int, segment: int) -> None:
    assert Settings().segment(size) == segment


def test_the_shared_segments_size_is_a_setting() -> None:
    assert Settings(large_segment_size=64 * MIB).segment(5 * MIB) == 64 * MIB
