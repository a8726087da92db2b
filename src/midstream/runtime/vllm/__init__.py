"""Knowledge of vLLM's internals: seams, rules and attributes, as data."""
