"""Alembic's migrations of the hub's database, from schema 2 on (`schema.py` runs them; there is no alembic.ini).

env.py                      what Alembic calls: uses the transaction that `schema` has open
versions/0001_baseline.py   schema 2, as it was
versions/0002_fleet.py      schema 3: windows, suspensions, hard deadlines; the ledger's outbox and subjects; leaders
"""
