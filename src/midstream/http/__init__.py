"""HTTP formats that server and client share."""
