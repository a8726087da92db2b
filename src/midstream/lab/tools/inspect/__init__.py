"""`midstream inspect`: tables of a store's contents, and a chart of activation norms."""
