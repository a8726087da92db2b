"""A transformers model with hooks at midstream's sites, which are found by arithmetic."""
