"""The supervised warm start: reading demonstrations, choosing them by filters, training on them by the step of RL."""
