"""The engine core's process."""
