"""What `shoal demo` makes and checks: the whole system on one machine in minutes, with a worker that cheats.

recipe.toml   what is trained: the tiny policy, sorting digits
place         where it runs and who plays what: a folder of its own, an earlier demo replaced or kept
claims        what must be true at the end, decided from the ledger and the metrics alone
records       every claim in turn, from what the run left: ledger, rollouts, model
recount       the exported model, scored again in a process of its own with plain transformers
plot          reward and held-out score over time, as a picture
"""
