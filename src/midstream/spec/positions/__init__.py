"""Which tokens a capture, edit or probe selects."""
