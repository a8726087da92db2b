"""Device tables and buffers."""
