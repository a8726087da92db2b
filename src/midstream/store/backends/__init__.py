"""Where shards are kept."""
