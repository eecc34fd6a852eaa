"""The hub's decisions, and nothing else: rows and events in, commands out.

    machines     the states of units, leases, submissions and nodes, and the tables of legal moves
    rows         frozen rows, as loaded in one transaction; Rules and Progress
    commands     what a decision asks for, or how it says no
    draws        seeds and task of a unit, from its number and the tasks' difficulty
    pacing       how many units may be alive, and how many of them one node gets
    units        what happens to a unit after a failed attempt
    leases       plan, issue, renew, expire, release
    newcomers    what nodes on probation may take together, of units and of audits
    submissions  receive: new, the same again, another body, late, not yours; progress that is shown before
    audits       claim, expire, abandon, judge; what a failed audit takes back
    reputation   how deeply a node is audited, what audits do to its record, and what many nodes' failures mean
    credits      credit: at once, or pending, then matured or void
    nodes        register, liveness, window of leases, sanctions
    batches      policies announced by the trainer, and the groups of a step
    evaluations, calibrations, orders

No asyncio, time, random, os or database module is imported here, and no function is given a function: the time is an
argument, what is random comes from the run's secret, and what is signed or drawn is done by the caller before or after.
"""
