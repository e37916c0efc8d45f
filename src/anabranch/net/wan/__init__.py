"""A wide-area network on one machine: real processes, each in a network of its own, behind an emulated WAN.

Every host is a Linux network namespace with one TUN device; a router process moves IPv4 packets between the
devices, with delay, jitter, loss, rates, bounded queues, duplicates, reordering and partitions per ordered
pair. Needs Linux and root, no kernel module but `tun`. Start at `router.WanRouter`; `router.available()` says
why it cannot run here.
"""
