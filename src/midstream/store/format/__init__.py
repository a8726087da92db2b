"""The shard file format, see `docs/store-format.md`."""
