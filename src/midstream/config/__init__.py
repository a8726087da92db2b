"""Every setting, its default, and its reader."""
