"""Planning one step."""
