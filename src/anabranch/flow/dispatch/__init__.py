"""Choice of the next hop of each microbatch when it is sent, and the planned share of a batch of each relay.

Not in it: the plan itself (`flow.auction`, `flow.gwtf`) and the choice of a policy by name (`flow.policies`).

Imported by: flow.policies, protocol, sim.
"""
