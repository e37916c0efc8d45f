"""The page of a run: its files, the server that shows it, the report that holds all of it."""
