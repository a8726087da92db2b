"""What the scores of probes do while a request runs: acts of probes, and controllers."""
