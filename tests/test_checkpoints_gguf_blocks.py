"""Every quantisation of GGUF files against plain decoders, one block at a time."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from entmtp_jax.checkpoints.gguf_container import READABLE, read_gguf, read_tensor
from entmtp_jax.errors import UserError


def half(block: bytes, at: int) -> float:
    return float(np.frombuffer(block, np.float16, 1, at)[0])


def nibbles(data: bytes) -> list[int]:
    """Low halves of all bytes, then high halves."""
    return [byte & 15 for byte in data] + [byte >> 4 for byte in data]


def fifth_bits(data: bytes) -> list[int]:
    word = int.from_bytes(data, "little")
    return [(word >> i) & 1 for i in range(32)]


def decode_q8_0(block):
    return [half(block, 0) * (byte - 256 if byte > 127 else byte) for byte in block[2:]]


def decode_q4_0(block):
    return [half(block, 0) * (q - 8) for q in nibbles(block[2:])]


def decode_q4_1(block):
    return [half(block, 0) * q + half(block, 2) for q in nibbles(block[4:])]


def decode_q5_0(block):
    bits = fifth_bits(block[2:6])
    return [half(block, 0) * (q + 16 * bit - 16) for q, bit in zip(nibbles(block[6:]), bits, strict=True)]


def decode_q5_1(block):
    bits = fifth_bits(block[4:8])
    return [half(block, 0) * (q + 16 * bit) + half(block, 2) for q, bit in zip(nibbles(block[8:]), bits, strict=True)]


def k_scales(packed: bytes) -> list[tuple[int, int]]:
    """Eight pairs of 6-bit scale and minimum out of 12 bytes."""
    pairs = [(packed[j] & 63, packed[j + 4] & 63) for j in range(4)]
    for j in range(4):
        low = packed[j + 8]
        pairs.append(((low & 15) | (packed[j] >> 6) << 4, (low >> 4) | (packed[j + 4] >> 6) << 4))
    return pairs


def decode_k(block, bits_at, quants_at):
    values = []
    for sub, (scale, minimum) in enumerate(k_scales(block[4:16])):
        for i in range(32):
            byte = block[quants_at + 32 * (sub // 2) + i]
            q = byte >> 4 if sub % 2 else byte & 15
            if bits_at is not None:
                q += 16 * ((block[bits_at + i] >> sub) & 1)
            values.append(half(block, 0) * scale * q - half(block, 2) * minimum)
    return values


def decode_q4_k(block):
    return decode_k(block, None, 16)


def decode_q5_k(block):
    return decode_k(block, 16, 48)


def decode_q6_k(block):
    values = []
    for i in range(256):
        part, place, lane = i // 128, i % 128 // 32, i % 32
        low = block[64 * part + 32 * (place % 2) + lane] >> (4 * (place // 2)) & 15
        high = block[128 + 32 * part + lane] >> (2 * place) & 3
        scale = np.frombuffer(block, np.int8, 16, 192)[i // 16]
        values.append(half(block, 208) * int(scale) * ((low | high << 4) - 32))
    return values


def decode_bf16(block):
    return [float(np.frombuffer(b"\0\0" + block, np.float32)[0])]


DECODERS = {
    "F32": (4, [], lambda block: np.frombuffer(block, np.float32).tolist()),
    "F16": (2, [0], lambda block: [half(block, 0)]),
    "BF16": (2, [], decode_bf16),
    "Q8_0": (34, [0], decode_q8_0),
    "Q4_0": (18, [0], decode_q4_0),
    "Q4_1": (20, [0, 2], decode_q4_1),
    "Q5_0": (22, [0], decode_q5_0),
    "Q5_1": (24, [0, 2], decode_q5_1),
    "Q4_K": (144, [0, 2], decode_q4_k),
    "Q5_K": (176, [0, 2], decode_q5_k),
    "Q6_K": (210, [208], decode_q6_k),
}


def random_blocks(kind: str, count: int) -> list[bytes]:
    """Random bytes with finite numbers where a block holds floats."""
    generator = np.random.default_rng(len(kind) + count)
    size, halves, _ = DECODERS[kind]
    if kind in ("F32", "BF16"):
        floats = generator.normal(size=count).astype(np.float32)
        return [value.tobytes()[-size:] for value in floats]
    blocks = generator.integers(0, 256, (count, size), dtype=np.uint8)
    for at in halves:
        blocks[:, at : at + 2] = generator.normal(size=(count, 1)).astype(np.float16).view(np.uint8)
    return [block.tobytes() for block in blocks]


def test_a_decoder_for_every_readable_kind():
    assert set(DECODERS) == set(READABLE)


@pytest.mark.parametrize("rows", [1, 6, 35])
@pytest.mark.parametrize("kind", READABLE)
def test_every_kind_is_decoded_as_its_layout_says(kind, rows, tmp_path):
    block_values = gguf.GGML_QUANT_SIZES[Kind[kind]][0]
    per_row = 512 // block_values
    blocks = random_blocks(kind, rows * per_row)
    data = np.frombuffer(b"".join(blocks), np.uint8).reshape(rows, -1)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("x", data, raw_dtype=Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "one.gguf")
    assert file.tensors["x"].shape == (rows, 512)
    expected = np.array([DECODERS[kind][2](block) for block in blocks]).reshape(rows, 512)
    np.testing.assert_allclose(read_tensor(file, "x"), expected, rtol=2e-6, atol=1e-5)


def test_a_kind_that_cannot_be_read_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("x", np.zeros((1, 98), np.uint8), raw_dtype=Kind.IQ3_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match="tensor 'x' has type IQ3_XXS; readable types: F32"):
        read_gguf(tmp_path / "model.gguf")
