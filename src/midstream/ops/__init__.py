"""The `site` op, which every tap calls: layout of its buffers, reference and Triton kernel."""
