"""What `shoal demo` makes and checks: the whole system on one machine in minutes, with a worker that cheats.

recipe.toml   what is trained: the tiny policy, sorting digits
claims        where it runs and who plays what; what must be true at the end, decided from ledger, rollouts and model
recount       the exported model, scored again in a process of its own with plain transformers
"""
