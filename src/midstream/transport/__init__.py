"""How captured rows get from the device to those who asked for them."""
