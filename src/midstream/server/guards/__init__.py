"""Guards of a server at work: which a request has, what their scores do, and who is told of it."""
