"""Functions of rows and numbers that the `site` op uses: activations, σ and norms."""
