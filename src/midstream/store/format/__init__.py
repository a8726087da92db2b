"""Shard file format; see `docs/store-format.md`."""
