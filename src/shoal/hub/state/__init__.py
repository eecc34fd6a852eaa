"""The hub's decisions: rows and events in, commands out. No asyncio, time, random, os or database module is imported,
and no function is given a function: the time is an argument, what is random comes from the run's secret."""
