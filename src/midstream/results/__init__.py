"""Results of a request: activations, probe scores, receipt."""
