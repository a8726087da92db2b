"""Shards taken apart and put together again, with right checksums, whatever was done to them."""

import json
import struct
import zlib

BLOCK = 65536


def take_apart(data: bytes) -> tuple[dict, dict[str, bytes]]:
    """(the header, each tensor's bytes but for those of the checksums)."""
    start = 8 + int.from_bytes(data[:8], "little")
    described = json.loads(data[8:start])
    parts = {}
    for name, tensor in described.items():
        if name not in ("__metadata__", "checksums"):
            first, last = tensor["data_offsets"]
            parts[name] = data[start + first : start + last]
    return described, parts


def seal(head: bytes, data: bytes) -> bytes:
    """Head and data with the checksums that are right for them."""
    words = [zlib.crc32(head)]
    words += [zlib.crc32(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
    packed = struct.pack(f"<{len(words)}I", *words)
    return head + data + packed + struct.pack("<I", zlib.crc32(packed))


def head_of(text: bytes) -> bytes:
    """A header's JSON with its length and padding."""
    text += b" " * (-(8 + len(text)) % 64)
    return struct.pack("<Q", len(text)) + text


def put_together(described: dict, parts: dict[str, bytes]) -> bytes:
    """A shard with this header and these tensors, in the header's order."""
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )
    names = [name for name in described if name in parts]
    return seal(head_of(text), b"".join(parts[name] for name in names))


def replaced(data: bytes, **texts: bytes) -> bytes:
    """The shard with other bytes in tensors, as long as the old: shapes stay as they are."""
    described, parts = take_apart(data)
    for name, text in texts.items():
        name = name.replace("__", ".")
        assert len(text) == len(parts[name]), name
        parts[name] = text
    return put_together(described, parts)
