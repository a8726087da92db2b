"""Storage backends: local directories and S3-compatible object stores."""
