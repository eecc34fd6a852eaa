"""What the broadcast benchmarks share: child processes that are watched, network namespaces, and their reports."""
