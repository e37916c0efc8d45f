"""WHAT is computed: models, partition, forward, input and weight gradients, exact sums, optimizer."""
