"""Command-line tools for models, stores and planning."""
