"""The ledger of a run: read from wherever it is, and verified.

sources    open_ledger: a hub's address, a run's folder, or an exported file ─► entries, and heads to check them by
check      check_ledger: chain, heads, accounts, evidence, in one pass; Book, shares_at; export_ledger
witness    run_witness: watches that a ledger only grows; witness_pins: what witnesses signed
recheck    recheck_ledger: units judged again, from what a run's folder has kept
"""
