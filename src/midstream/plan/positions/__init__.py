"""Position selections: which tokens a capture, edit or probe applies to."""
