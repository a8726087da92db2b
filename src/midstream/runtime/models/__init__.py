"""Layer conventions of model architectures."""
