"""`shoal demo`: the whole system on one machine in minutes, with a worker that cheats.

recipe.toml  what is trained     claims  what must be true at the end     recount  scoring the exported model again
"""
