"""Other tools' files, read without running anything that is in them."""
