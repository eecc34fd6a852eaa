from kit.cast import lab

__all__ = ["lab"]  # a fixture for whoever names it
