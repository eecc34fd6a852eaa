"""What `staleness.py` is made of: a run whose rollouts have an exact age, and what is said of many such runs."""
