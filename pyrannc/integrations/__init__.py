"""RaNNCModule under frameworks that own the training loop. Each module needs its framework, which is imported there."""
