"""The op that every tap calls, and the layout of the buffers that it works on."""
