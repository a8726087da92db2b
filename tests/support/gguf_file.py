"""Writer of GGUF files for tests."""

import struct

ALIGN = 32


def gguf_bytes(
    metadata: list[tuple[bytes, int, bytes]],
    tensors: list[tuple[bytes, tuple[int, ...], int, bytes]],
    *,
    version: int = 3,
) -> bytes:
    """A GGUF file: metadata as (key, kind, encoded value), tensors as (name, shape, kind, raw)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, kind, value in metadata:
        head += struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value
    body = b""
    for name, shape, kind, raw in tensors:
        head += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", kind, len(body))
        body += raw + bytes(-len(raw) % ALIGN)
    return head + bytes(-len(head) % ALIGN) + body


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value
