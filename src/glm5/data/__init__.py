"""Documents and conversations → packed batches."""
