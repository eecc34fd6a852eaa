"""The hub's decisions, and nothing else: rows and events in, commands out.

    machines     the states of units, leases, submissions and nodes, and the tables of legal moves
    rows         frozen rows, as loaded in one transaction; Rules and Progress
    commands     what a decision asks for
    draws        seeds and task of a unit, from its number
    pacing       how many units may be alive, and how many of them one node gets
    units        what happens to a unit after a failed attempt
    leases       grant, renew, expire, release
    windows      how many leases a node may hold: wider with accepted groups, halved when leases lapse
    newcomers    what nodes on probation may take together, of units and of audits
    submissions  receive: new, the same again, another body, late, not yours
    audits       claim, expire, abandon, judge
    reputation   how deeply a node is audited, and what audits do to its record
    gains        what follows when tolerance was used to buy reward
    credits      credit: at once, or pending, then matured or void
    pulls        what a failed audit does to the rest of its node's work
    nodes        register, what rejected work costs, liveness
    sanctions    suspend, lift, ban, pardon
    policies     announce, incarnations
    batches      choose the groups of a step
    refusals     how a decision says no

No asyncio, time, random, os or database module is imported here: the time is an argument, and what is random comes
from the run's secret. Tests, simulator and production share this one brain.
"""
