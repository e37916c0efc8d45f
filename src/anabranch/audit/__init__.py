"""Whether a run was what it says: every step taken again in one process, compared with log and state."""
