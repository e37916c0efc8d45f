"""`anabranch simtest`: swarms and schedules of faults drawn from seeds, run by the real protocol in virtual
time, with every invariant checked after every event (DESIGN §6)."""
