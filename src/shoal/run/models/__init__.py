"""What `shoal eval`, `shoal filter` (`measuring`) and `shoal sft` (`warm_start`) do with a model."""
