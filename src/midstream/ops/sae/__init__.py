"""Reconstruction of vectors by sparse autoencoders (SAEs), a part of the op `site`."""
