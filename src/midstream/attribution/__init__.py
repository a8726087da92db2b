"""Gradients and attribution patching by a transformers model on the engine's weights."""
