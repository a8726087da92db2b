"""Routes of sweeps and fits, a module each."""
