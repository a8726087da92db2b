"""The process that has the user's call."""
