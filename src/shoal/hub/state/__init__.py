"""The hub's decisions, and nothing else: rows and events in, commands out.

No asyncio, time, random, os or database module is imported here, and no function is given a function: the time is an
argument, what is random comes from the run's secret, and what is signed or drawn is done by the caller before or after.
"""
