"""The supervised warm start: reading demonstrations, selecting them by filters, training with the step of RL."""
