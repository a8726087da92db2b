"""What is known of vLLM's internals, as data."""
