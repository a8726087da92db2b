"""Results on the way back."""
