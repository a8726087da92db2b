"""The demo: the report on a small model and on sentences of its own (`midstream demo --help`)."""
