"""Sparse autoencoders and their file formats, read without running code from files."""
