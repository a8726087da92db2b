"""Transport of captured rows from the device to the front end."""
