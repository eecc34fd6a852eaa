"""`shoal demo`: the whole system on one machine in minutes, with a worker that cheats; what it claims is checked.

recipe.toml   what is trained: the tiny policy, sorting digits
run           the story: make room, run everything, check what came out
place         where it runs: a folder of its own, an earlier demo replaced or kept
claims        what must be true at the end, decided from the ledger and the metrics alone
records       the ledger as a file, verified
recount       the exported model, scored again in a process of its own with plain transformers
plot          reward and held-out score over time, as a picture
"""
