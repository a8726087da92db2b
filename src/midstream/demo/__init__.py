"""The demo: one command that captures, fits a direction, steers, and writes a report.

python -m midstream.demo --help
"""
