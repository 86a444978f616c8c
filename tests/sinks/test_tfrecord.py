"""The framing of event files against TensorBoard's own."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from tensorboard.summary.writer.record_writer import RecordWriter

from megatron_probes.sinks.tfrecord import crc32c, frame


def test_check_value_of_crc32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@given(st.binary(min_size=4, max_size=2000))
def test_frames_are_those_of_tensorboard(data: bytes) -> None:
    expected = io.BytesIO()
    RecordWriter(expected).write(data)
    assert frame(data) == expected.getvalue()
