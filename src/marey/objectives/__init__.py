"""What is learned; each objective has its own ``forward_train_batch``."""
