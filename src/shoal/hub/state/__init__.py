"""The hub's decisions, and nothing else: rows and events in, commands out.

    machines     the states of units, leases, submissions and nodes, and the tables of legal moves
    rows         frozen rows, as loaded in one transaction; Rules and Progress
    commands     what a decision asks for
    draws        seeds and task of a unit, from its number
    pacing       how many units may be alive
    units        what happens to a unit after a failed attempt
    leases       grant, expire, release
    submissions  receive: new, the same again, another body, late, not yours
    audits       claim, expire, abandon, judge
    nodes        register, strikes and bans
    policies     announce, incarnations
    batches      choose the groups of a step
    refusals     how a decision says no

No asyncio, time, random, os or database module is imported here: the time is an argument, and what is random comes
from the run's secret. Tests, simulator and production share this one brain.
"""
