"""The framing of TensorBoard's event files: length, checksums, data.

TensorBoard's own writer computes the checksum byte by byte in Python, which holds the interpreter for
milliseconds a step. CRC-32C is linear over bits, so here all bytes of a block are looked up at once.
"""

from __future__ import annotations

import struct

import numpy as np

_BLOCK = 256
_ONES = 0xFFFFFFFF
_POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected


def _contributions() -> np.ndarray:
    """[place in a block, byte] uint32: what a byte at that place adds (xor) to the state after the block."""
    state = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        state = np.where(state & 1, (state >> 1) ^ np.uint32(_POLYNOMIAL), state >> 1)
    one_byte = state
    table = np.empty((_BLOCK, 256), dtype=np.uint32)
    for place in reversed(range(_BLOCK)):
        table[place] = state
        state = one_byte[state & 0xFF] ^ (state >> 8)  # one zero byte further
    return table


_TABLE = _contributions()
_PLACES = np.arange(_BLOCK)
_FIRST_FOUR: list[list[int]] = _TABLE[:4].tolist()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of at least four bytes."""
    # The start value acts like ones on the first four bytes; zeros before them change nothing.
    padded = np.zeros(-(-len(data) // _BLOCK) * _BLOCK, dtype=np.uint8)
    tail = padded[len(padded) - len(data) :]
    tail[:] = np.frombuffer(data, dtype=np.uint8)
    tail[:4] ^= 0xFF
    blocks = np.bitwise_xor.reduce(_TABLE[_PLACES, padded.reshape(-1, _BLOCK)], axis=1)
    state = 0
    for block in blocks.tolist():
        for place, table in enumerate(_FIRST_FOUR):
            block ^= table[(state >> (8 * place)) & 0xFF]
        state = block
    return state ^ _ONES


def _masked_crc32c(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & _ONES)


def frame(data: bytes) -> bytes:
    """Return `data`, at least four bytes, as one record of an event file."""
    length = struct.pack("<Q", len(data))
    return length + _masked_crc32c(length) + data + _masked_crc32c(data)
