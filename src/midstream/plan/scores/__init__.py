"""How the numbers that the device computes for each token become the scores of a probe."""
