"""`shoal ledger`: reading a ledger wherever it is, and believing none of it that cannot be verified.

places     open_place: a hub's address, a run's folder, or an exported file ─► entries, and heads to check them by
heads      KeptHead: the head that was seen last, kept on this machine; read_head_file
checking   check_ledger: chain, heads, accounts, evidence, in one pass
forks      the proof of a forked ledger as a file
witnessing run_witness: watches that a ledger only grows; witness_pins: what witnesses signed
rechecking recheck_ledger: units judged again, from what a run's folder has kept
exporting  export_ledger, leave_ledger
telling    tell_account, tell_shares: tables for people
"""
