"""What users call in Python."""
