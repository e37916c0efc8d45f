"""What people see of a run: events folded into one bounded state, kept so that it can be replayed."""
