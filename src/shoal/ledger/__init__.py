"""The ledger: an append-only hash chain of everything that gave or cost credit, and the accounts that follow from it.

chain         append, verify; Chain and Pin, entry by entry; ForkProof: two documents that cannot both be true
accounts      fold: the credit of each node; shares_of: the share of each owner
evidence      Keys, Proofs: each row against the signed receipt and verdict that it points to; check_rows: all
              checks in one pass over a ledger
"""

# fmt: off
# isort: off
from shoal.ledger.accounts import CREDIT_PER_TOKEN, Account, Accounts, Share, Shares, credit_for, fold, shares_of
from shoal.ledger.chain import (
    EVIDENCED, GENESIS, KINDS, Chain, ForkProof, Pin, append, check_fork, head_of, is_run_of, node_subject, subjects,
    unit_subject, verify,
)
from shoal.ledger.evidence import Keys, Proofs, open_order

__all__ = [
    "CREDIT_PER_TOKEN", "EVIDENCED", "GENESIS", "KINDS", "Account", "Accounts", "Chain", "ForkProof", "Keys", "Pin",
    "Proofs", "Share", "Shares", "append", "check_fork", "credit_for", "fold", "head_of", "is_run_of", "node_subject",
    "open_order", "shares_of", "subjects", "unit_subject", "verify",
]
