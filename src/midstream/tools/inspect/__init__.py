"""What is in a store, for people: a table, one request, the norms of its rows as a picture."""
