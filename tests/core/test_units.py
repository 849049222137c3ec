import pytest
from hypothesis import given
from hypothesis import strategies as st

from brimful.core.errors import UsageError
from brimful.core.units import (
    Batch,
    Duration,
    GiB,
    MiB,
    exact_bytes,
    format_bytes,
    parse_bytes,
    parse_count,
    parse_duration,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("21.5GiB", int(21.5 * GiB)),
        ("512 MiB", 512 * MiB),
        ("24GB", 24 * 10**9),
        ("1024", 1024),
        (" 1 gib ", GiB),
        (7, 7),
        ("0 GiB", 0),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "12 bananas", "-1 GiB", "1..5GiB", "1e9", -1, True])
def test_what_is_no_size_is_refused_with_an_example(text: str | int) -> None:
    with pytest.raises(UsageError) as error:
        parse_bytes(text)
    assert "21.5GiB" in str(error.value.hint)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (int(21.5 * GiB), "21.5 GiB"),
        (int(3.94 * GiB), "3.94 GiB"),
        (GiB, "1.00 GiB"),
        (GiB - 1, "1.00 GiB"),
        (512 * MiB, "512 MiB"),
        (MiB // 4, "0.25 MiB"),
        (1, "0.01 MiB"),
        (0, "0 MiB"),
        (-2 * GiB, "-2.00 GiB"),
    ],
)
def test_sizes_print_with_three_figures(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(MiB, 2**50))
def test_a_printed_size_reads_back_to_within_its_figures(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.05)


@given(st.integers(0, 2**60))
def test_an_exact_size_reads_back_exactly(size: int) -> None:
    assert parse_bytes(exact_bytes(size)) == size
    assert parse_bytes(str(size)) == size


@pytest.mark.parametrize(
    ("text", "batch"),
    [
        ("16 sequences", Batch(sequences=16)),
        ("1 sequence", Batch(sequences=1)),
        ("16384 tokens", Batch(tokens=16384)),
        ("16_384 tokens", Batch(tokens=16384)),
        ("16", Batch(sequences=16)),
        (16, Batch(sequences=16)),
    ],
)
def test_a_batch_has_a_unit_and_sequences_is_the_one_meant(text: str | int, batch: Batch) -> None:
    assert parse_count(text) == batch
    assert parse_count(str(batch)) == batch


@pytest.mark.parametrize("text", ["0", "1.5 sequences", "16 apples", "", 0, -4])
def test_what_is_no_batch_is_refused(text: str | int) -> None:
    with pytest.raises(UsageError):
        parse_count(text)


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("500 steps", Duration(steps=500)),
        ("1 step", Duration(steps=1)),
        ("3 epochs", Duration(epochs=3)),
        ("0.5 epochs", Duration(epochs=0.5)),
    ],
)
def test_a_duration_is_read_and_written_with_its_unit(text: str, duration: Duration) -> None:
    assert parse_duration(text) == duration
    assert parse_duration(str(duration)) == duration


@pytest.mark.parametrize("text", ["500", "1.5 steps", "2 days", ""])
def test_a_duration_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_duration(text)
