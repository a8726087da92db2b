"""The GPU worker's process."""
