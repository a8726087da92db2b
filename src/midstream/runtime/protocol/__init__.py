"""Messages between the front end, the engine core and the workers."""
