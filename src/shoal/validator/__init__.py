"""The validator: checks every submission before it may be trained on, and computes its reward. Trusted.

settings, profiles    settings and configuration; what rounding may explain, for each kind of worker
calibrate, limits     measuring the limits of a kind of worker; keeping those of a run up to date
loop, side_jobs       claim audits, judge, report; evaluate, generate and load policies between audits
judge, verdicts       verdicts on the submissions of one policy: one batched prefill, a second look
checks, case          every check, cheapest first, and the table of reason codes; the data that a check sees
bands, evidence       from honest work to limits; the statistical test of a node
rewards, branches     the reward; whether reward was gained within the tolerance
canary                a known cheat now and then, which must be caught; a self-test before joining
"""
